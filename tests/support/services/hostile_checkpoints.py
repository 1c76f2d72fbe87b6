"""Checkpoint folders that nobody should be able to hurt a gateway or a host with: each is a small
good one with one thing changed.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from services.cli.cluster.service_options import DEMO_MODEL_DIR

Spoil = Callable[[Path], None]
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
DEEP = "[" * 100_000 + "]" * 100_000
CATASTROPHES = ("(a+)+$", "(a|a)*$", "(a|aa)+$", "a*a*[bc]", "(?=(a+)+b)", "(.*)*(.*)*x")

AT_COMPILE = (
    "{{ 9 ** (9 ** 9) }}",
    "{{ 10 ** 10 ** 9 % 7 }}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ [0] * 10 ** 11 }}",
    "{{ ('a' * 10 ** 9) | upper | length }}",
    "{{ '%0999999999999d' % 1 }}",
    "{{ '%999999999s' % 'a' }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ ('a' * 30000) | replace('', 'b' * 10 ** 6) }}",
    "{{ 'a' | indent(10 ** 10, true) }}",
    "{{ (" + "(" * 5000 + "1" + ")" * 5000 + ") }}",
    "{% if 1 %}" * 400 + "{% endif %}" * 400,
    "{% for a in b %}" * 60 + "{% endfor %}" * 60,
    "{{ 1" + " + 1" * 100_000 + " }}",
    "{{ 'a'" + " | upper" * 20_000 + " }}",
    "{{ " + "9" * 100_000 + " }}",
    "{{ 1e999 }}{{ -1e999 | int }}",
    "{% macro a() %}" * 200 + "{% endmacro %}" * 200,
    "{% unknown %}",
    "{{ nosuchfilter | nosuch }}",
    "{% include 'config.json' %}",
    "{% import '/etc/passwd' as x %}",
    "{{ unclosed",
)
AT_RENDER = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(t='x' * 1000) %}{% for a in range(40) %}{% set n.t = n.t ~ n.t %}"
    "{% endfor %}",
    "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ messages[0].content * 10 ** 10 }}",
    "{{ (messages | length + 8) ** (messages | length + 8) ** 9 }}",
    "{{ range(10 ** 12) | list }}",
    "{{ lipsum(n=10 ** 6) }}",
    "{{ messages.__class__.__mro__ }}{{ self.__init__.__globals__ }}",
    "{{ raise_exception('no' * 100000) }}",
    "{{ strftime_now('%Y' * 10 ** 6) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ 'x' * 70000000 }}",
)
VALUES: tuple[Any, ...] = (None, 1, "x", [], {}, [[]], {"type": "x"})
DOCUMENTS = {
    "list": b"[]",
    "text": b'"x"',
    "number": b"1",
    "null": b"null",
    "deep": DEEP.encode(),
    "deep_objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "torn": b'{"eos_token_id": [1,',
    "not_utf8": b'{"a": "\xff\xfe"}',
    "surrogate": b'{"chat_template": "\\ud800", "bos_token": "\\udfff"}',
    "nan": b'{"temperature": NaN, "top_p": Infinity, "eos_token_id": -Infinity}',
    "huge_numbers": b'{"eos_token_id": 1e400, "temperature": 1' + b"0" * 5000 + b"}",
    "empty": b"",
    "zeros": bytes(1000),
}
LARGE_DOCUMENTS: dict[str, Callable[[], bytes]] = {
    "wide": lambda: json.dumps(dict.fromkeys(map(str, range(600_000)), 0)).encode(),
    "wide_lists": lambda: b'{"a":[' + b"[1],[]," * 1_000_000 + b"1]}",
}
GENERATION: tuple[dict[str, Any], ...] = (
    {"eos_token_id": -1},
    {"eos_token_id": 2**70},
    {"eos_token_id": list(range(100_000))},
    {"eos_token_id": [[2]]},
    {"temperature": -1},
    {"temperature": 10**400},
    {"top_k": 2**70},
    {"top_p": 7},
    {"repetition_penalty": 0},
    {"max_new_tokens": 2**70},
    {"max_new_tokens": -5},
)
JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
WEIGHTS, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "hearth_bundle.json"
SHARD = "model-00001-of-00001.safetensors"
LISTS = (INDEX, MANIFEST)  # of the tensors
FILES = (*JSON_FILES, *LISTS, WEIGHTS, SHARD, "chat_template.jinja", "README.md")


def spoiled(good: Path, root: Path, name: str, spoil: Spoil) -> Path:
    path = Path(shutil.copytree(good, root / name.replace("/", "_"), symlinks=True))
    (path / "chat_template.jinja").write_text(HEAD)
    spoil(path)
    return path


def for_host(root: Path, spoils: Sequence[tuple[str, Spoil]]) -> Iterator[Path]:
    """Spoiled copies of a folder that a host can plan; each is deleted after its use."""
    good = shutil.copytree(DEMO_MODEL_DIR, root / "good", ignore=lambda *_: [WEIGHTS])
    (root / "good" / WEIGHTS).symlink_to(DEMO_MODEL_DIR / WEIGHTS)
    for each in spoils:
        path = spoiled(Path(good), root, *each)
        yield path
        shutil.rmtree(path)


def folders() -> list[tuple[str, Spoil]]:
    """Named changes to a good folder."""
    return [
        *_templates(),
        *_documents(),
        *_tokenizer_values(),
        *_tokenizer_steps(),
        *_vocabularies(),
        *_response_templates(),
        *_kinds_of_files(),
        *_weights(),
    ]


def _templates() -> Iterator[tuple[str, Spoil]]:
    for number, text in enumerate(AT_COMPILE):
        yield f"compile_{number}", _written("chat_template.jinja", (text + HEAD).encode())
    for number, text in enumerate(AT_RENDER):
        yield f"render_{number}", _written("chat_template.jinja", (HEAD + text).encode())
    yield "template_not_utf8", _written("chat_template.jinja", b"{{ '\xff\xfe' }}")
    yield "template_huge", _written("chat_template.jinja", b"{{ 1 }}" * 400_000)
    yield "template_nul", _written("chat_template.jinja", b"\0" * 1000)
    for name, value in {
        "number": 1,
        "names": [{"name": 1}],
        "deep": json.loads("[" * 400 + "]" * 400),
    }.items():
        yield f"template_field_{name}", _changed("tokenizer_config.json", chat_template=value)


def _documents() -> Iterator[tuple[str, Spoil]]:
    for file in (*JSON_FILES, *LISTS):
        for kind, data in DOCUMENTS.items():
            yield f"{file}_{kind}", _in_place(file, _written(file, data))
        for kind, make in LARGE_DOCUMENTS.items():
            yield f"{file}_{kind}", _in_place(file, _made(file, make))
    for number, fields in enumerate(GENERATION):
        yield f"generation_{number}", _changed("generation_config.json", **fields)


def _tokenizer_values() -> Iterator[tuple[str, Spoil]]:
    for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder"):
        for number, value in enumerate(VALUES):
            yield f"{key}_{number}", _changed("tokenizer.json", **{key: value})
    for key, value in {"post_processor": {"type": "x"}, "padding": 7, "truncation": "x"}.items():
        yield f"{key}_wrong", _changed("tokenizer.json", **{key: value})


def _tokenizer_steps() -> Iterator[tuple[str, Spoil]]:
    for number, pattern in enumerate(CATASTROPHES):
        replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "b"}
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        yield f"normalizer_regex_{number}", _changed("tokenizer.json", normalizer=replace)
        yield f"splitting_regex_{number}", _changed("tokenizer.json", pre_tokenizer=split)
        yield f"decoder_regex_{number}", _changed("tokenizer.json", decoder=replace)
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    growing = {"type": "Sequence", "normalizers": [double] * 40}
    yield "growing_normalizer", _changed("tokenizer.json", normalizer=growing)
    yield (
        "growing_decoder",
        _changed("tokenizer.json", decoder={"type": "Sequence", "decoders": [double] * 40}),
    )
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 1}
    for name, steps in {"joined": [byte_level, strip], "single": [strip]}.items():
        stripping = {"type": "Sequence", "decoders": steps}
        yield f"stripping_{name}_decoder", _changed("tokenizer.json", decoder=stripping)
    untried = {"type": "Precompiled", "precompiled_charsmap": "AAAAAGIA"}  # a trie of no bytes
    yield "panicking_normalizer", _changed("tokenizer.json", normalizer=untried)
    long = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * (1 << 20)}
    yield "long_replacement", _changed("tokenizer.json", normalizer=long)
    prepend = {"type": "Prepend", "prepend": "a" * 1_000_000}
    yield "long_prepend", _changed("tokenizer.json", normalizer=prepend)
    around = [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}] * 100_000
    template = {
        "type": "TemplateProcessing",
        "single": [*around, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}
        },
    }
    yield "many_tokens_around", _changed("tokenizer.json", post_processor=template)
    padding = {
        "strategy": {"Fixed": 10**9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    yield "endless_padding", _changed("tokenizer.json", padding=padding)


def _vocabularies() -> Iterator[tuple[str, Spoil]]:
    def added(*tokens: tuple[int, str]) -> Spoil:
        fields = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return _changed(
            "tokenizer.json",
            added_tokens=[
                {"id": number, "content": text, "special": True, **fields}
                for number, text in tokens
            ],
        )

    yield "id_of_32_bits", added((2**32 - 1, "<x>"))
    yield "id_of_64_bits", added((2**64, "<x>"))
    yield "negative_id", added((-1, "<x>"))
    yield "empty_token", added((400, ""))
    yield "long_token", added((400, "<" + "x" * 1_000_000 + ">"))
    yield "many_tokens", added(*((400 + number, f"<{number}>") for number in range(100_000)))
    for kind in ("WordLevel", "WordPiece", "Unigram", "BPE", "Nothing"):
        yield f"empty_{kind}", _changed("tokenizer.json", model={"type": kind, "vocab": {}})
    millions = {"type": "BPE", "vocab": {f"{each}": each for each in range(2_000_000)}}
    yield "millions_of_tokens", _changed("tokenizer.json", model=millions | {"merges": []})
    scores = {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1e308], ["a", 1e308]]}
    yield "wrong_scores", _changed("tokenizer.json", model=scores)
    yield "vast_file", _sparse("tokenizer.json", 1 << 40)
    yield "vast_config", _sparse("tokenizer_config.json", 1 << 40)


def _response_templates() -> Iterator[tuple[str, Spoil]]:
    patterns = (
        *CATASTROPHES,
        "((((a{1,999}){1,999}){1,999}){1,999})",
        "(" * 5_000 + "a" + ")" * 5_000,
        "(?P<a",
        "(?<=" + "a|" * 10_000 + "b)",
        "(?:(?:x+x+)+y)|" * 200 + "z",
    )
    for number, pattern in enumerate(patterns):
        fields = {"content": {}, "thinking": {"open_pattern": pattern, "close": "</t>"}}
        yield (
            f"pattern_{number}",
            _changed("tokenizer_config.json", response_template={"fields": fields}),
        )
    marks = {"open": "<" + "t" * 100_000 + ">", "close": "x" * 100_000}
    yield (
        "long_marks",
        _changed("tokenizer_config.json", response_template={"fields": {"thinking": marks}}),
    )
    for number, value in enumerate(VALUES):
        yield (
            f"response_template_{number}",
            _changed("tokenizer_config.json", response_template=value),
        )
    wide: dict[str, Any] = {f"{each}": {} for each in range(200_000)}
    for name, value in {"fields": {"fields": wide}, "others": wide}.items():
        yield (
            f"response_template_wide_{name}",
            _changed("tokenizer_config.json", response_template=value),
        )


def _kinds_of_files() -> Iterator[tuple[str, Spoil]]:
    kinds: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: None,
        "fifo": os.mkfifo,
        "directory": lambda path: path.mkdir(),
        "loop": lambda path: path.symlink_to(path),
        "endless": lambda path: path.symlink_to("/dev/zero"),
        "memory": lambda path: path.symlink_to("/proc/self/mem"),
        "vast": _vast,
    }
    for file in FILES:
        for kind, make in kinds.items():
            yield f"{file}_{kind}", _in_place(file, _replaced(file, make))


def _weights() -> Iterator[tuple[str, Spoil]]:
    tensor = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
    headers: dict[str, Callable[[], object]] = {
        "many_tensors": lambda: {f"t{each}": tensor for each in range(1_000_000)},
        "long_name": lambda: {"\x1b" * 10_000_000: tensor},
        "long_shape": lambda: {"t": {**tensor, "shape": [1] * 10_000_000}},
        "huge_shape": lambda: {"t": {**tensor, "shape": [2**62] * 10_000}},
        "wide": lambda: {"__metadata__": {f"{each}": {} for each in range(4_000_000)}},
        "list": lambda: [],
    }
    for name, header in headers.items():
        yield f"header_{name}", _made(WEIGHTS, partial(_with_length, header))
    for length in (0, 1, 2**63, 2**64 - 1):
        yield f"header_of_{length}", _written(WEIGHTS, struct.pack("<Q", length) + b"{}")
    maps: dict[str, Callable[[], dict[str, str]]] = {
        "outside": lambda: {"a": "../../etc/passwd.safetensors"},
        "nul": lambda: {"a": "\0.safetensors"},
        "long_name": lambda: {"a": "a" * 10_000_000 + ".safetensors"},
        "many_files": lambda: {f"t{each}": f"{each}.safetensors" for each in range(500_000)},
    }
    for name, weight_map in maps.items():
        yield f"index_{name}", _in_place(INDEX, _made(INDEX, partial(_index_of, weight_map)))
    yield "index_same_file", _in_place(INDEX, _same_file)


def _with_length(header: Callable[[], object]) -> bytes:
    encoded = json.dumps(header()).encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _index_of(weight_map: Callable[[], dict[str, str]]) -> bytes:
    return json.dumps({"weight_map": weight_map()}).encode()


def _same_file(folder: Path) -> None:
    """An index of many shards, which are all the same file."""
    names = [f"{each}.safetensors" for each in range(10_000)]
    (folder / INDEX).write_bytes(_index_of(lambda: {name: name for name in names}))
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    data = _with_length(lambda: {f"t{each}": entry for each in range(100_000)})
    (folder / "shard").write_bytes(data)
    for name in names:
        (folder / name).symlink_to("shard")


def _in_place(file: str, spoil: Spoil) -> Spoil:
    """Spoils an index, or a shard, of a folder that has no single file of weights, which would be
    read in their place.
    """

    def spoil_shards(folder: Path) -> None:
        if (folder / WEIGHTS).exists():
            (folder / WEIGHTS).rename(folder / SHARD)
        (folder / INDEX).write_bytes(_index_of(lambda: {"a": SHARD}))
        spoil(folder)

    return spoil_shards if file in (INDEX, SHARD) else spoil


def _written(name: str, data: bytes) -> Spoil:
    return lambda folder: _write(folder / name, data)


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # it may be a link to a file of the repository
    path.write_bytes(data)


def _changed(name: str, **fields: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **fields}))

    return spoil


def _made(name: str, make: Callable[[], bytes]) -> Spoil:
    return lambda folder: _write(folder / name, make())


def _vast(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _sparse(name: str, num_bytes: int) -> Spoil:
    def spoil(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(num_bytes)

    return spoil


def _replaced(name: str, make: Callable[[Path], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil
