from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from shared.block_hash import (
    extend_chain,
    image_extras,
    prompt_chain,
    public_root,
    root_after_public,
    root_hash,
    root_key,
)
from shared.messages import ImagePart
from shared.packing import pack_token_ids

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_hash_values_never_change() -> None:
    """A changed hash would make all blocks cached by an older version useless, without an error."""
    root = root_hash("tenant", "weights")
    assert root.hex() == "d5fb4cb13c264b3f00db4c13c206971d"
    assert [each.hex() for each in extend_chain(root, [1, 2, 3, 4, 5], 2)] == [
        "7ad453a8dbcc300d72a62c2b8e915ba5",
        "feacf3e94c31db1219fbbb08498a301b",
    ]
    keyed = root_hash("tenant", "weights", key=root_key("secret"))
    assert keyed.hex() == "2c8047cbab54662bd91e6d28b61c98bb"


def test_hash_is_equal_in_another_process() -> None:
    code = "from shared.block_hash import root_hash; print(root_hash('t', 'w').hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == root_hash("t", "w").hex()


def test_every_root_field_changes_the_hash() -> None:
    roots = {
        root_hash("a", "b"),
        root_hash("b", "a"),
        root_hash("ab", ""),
        root_hash("", "ab"),
        root_hash("a", "b", cache_salt="c"),
        root_hash("a", "b", adapter="c"),
        root_hash("a", "", cache_salt="b"),
    }
    assert len(roots) == 7
    assert all(len(root) == 16 for root in roots)


def test_roots_depend_on_the_cluster_secret() -> None:
    keys = [root_key(secret) for secret in ("", "one", "another", "one" * 40)]
    for root_of in (root_hash, public_root):
        assert len({root_of("name", "weights", key=key) for key in keys}) == len(keys)
    assert root_hash("t", "w", key=root_key("")) == root_hash("t", "w")


@given(tokens, st.integers(1, 8), st.integers(0, 6))
def test_prompt_chain_joins_public_and_own_blocks(
    token_ids: list[int], block_size: int, num_public: int
) -> None:
    own, shared = root_hash("t", "w"), public_root("house", "w")
    num_public = min(num_public, len(token_ids) // block_size)
    chain = prompt_chain(
        pack_token_ids(token_ids),
        block_size,
        cache_root=own,
        public_root=shared,
        num_public_blocks=num_public,
    )
    head = extend_chain(shared, token_ids[: num_public * block_size], block_size)
    after = root_after_public(own, head[-1]) if head else own
    assert chain == head + extend_chain(after, token_ids[num_public * block_size :], block_size)


@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_a_hash(token_ids: list[int], block_size: int) -> None:
    chain = extend_chain(root_hash("t", "w"), token_ids, block_size)
    assert len(chain) == len(token_ids) // block_size
    assert len(set(chain)) == len(chain)


@given(tokens, st.integers(1, 8), st.integers(0, 5))
def test_chain_can_be_extended_in_steps(
    token_ids: list[int], block_size: int, num_blocks: int
) -> None:
    root = root_hash("t", "w")
    full = extend_chain(root, token_ids, block_size)
    cut = min(num_blocks, len(full))
    head = extend_chain(root, token_ids[: cut * block_size], block_size)
    tail = extend_chain([root, *head][-1], token_ids[cut * block_size :], block_size)
    assert head + tail == full


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(0, 7))
def test_token_changes_hashes_from_its_block_on(token_ids: list[int], at: int) -> None:
    root = root_hash("t", "w")
    changed = [token + (index == at) for index, token in enumerate(token_ids)]
    before, after = (extend_chain(root, each, 2) for each in (token_ids, changed))
    assert [a == b for a, b in zip(before, after, strict=True)] == [i < at // 2 for i in range(4)]


def test_two_tenants_share_no_hash() -> None:
    chains = [extend_chain(root_hash(tenant, "w"), range(64), 16) for tenant in ("a", "b")]
    assert not set(chains[0]) & set(chains[1])


IMAGE = 9  # the token id of all image tokens
# A text, or an image: its pixels, and the tokens of each of its tiles, which token 8 separates
texts = st.lists(st.integers(0, 9), min_size=1, max_size=3)
pictures = st.tuples(st.sampled_from("ab"), st.lists(st.integers(1, 3), min_size=1, max_size=2))
prompts_with_images = st.lists(st.one_of(texts, pictures), max_size=4)


def laid_out(
    parts: list[list[int] | tuple[str, list[int]]],
) -> tuple[list[int], list[tuple[object, ...]], list[ImagePart]]:
    """Returns token ids, what each token stands for, and the images."""
    token_ids: list[int] = []
    content: list[tuple[object, ...]] = []
    images: list[ImagePart] = []
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            content += [(each,) for each in part]
            continue
        pixels, tiles = part
        first = len(token_ids)
        for index, num_tokens in enumerate(tiles):
            separator = [8] if index else []
            token_ids += [*separator, *[IMAGE] * num_tokens]
            content += [(8,)] * len(separator)
            content += [(pixels, tuple(tiles), index, at) for at in range(num_tokens)]
        digest = f"{pixels}{tiles}".encode().ljust(16, b"-")[:16]
        images.append(
            ImagePart(
                first_token=first,
                num_tokens=len(token_ids) - first,
                image_hash=digest,
                grid=(0, 0),
            )
        )
    return token_ids, content, images


@given(prompts_with_images, prompts_with_images, st.integers(1, 4), st.sampled_from("tu"))
def test_prompts_share_a_block_iff_tenant_tokens_and_pixels_are_equal(
    parts: list[list[int] | tuple[str, list[int]]],
    others: list[list[int] | tuple[str, list[int]]],
    block_size: int,
    tenant: str,
) -> None:
    chains, contents = [], []
    for name, each in (("t", parts), (tenant, others)):
        token_ids, content, images = laid_out(each)
        extras = image_extras(images, block_size)
        chains.append(extend_chain(root_hash(name, "w"), token_ids, block_size, extras))
        contents.append(content)
    for index, hashes in enumerate(zip(*chains, strict=False)):
        end = (index + 1) * block_size
        is_equal = tenant == "t" and contents[0][:end] == contents[1][:end]
        assert (hashes[0] == hashes[1]) == is_equal


@given(prompts_with_images, st.integers(1, 4), st.integers(0, 5))
def test_chain_with_images_can_be_extended_in_steps(
    parts: list[list[int] | tuple[str, list[int]]], block_size: int, num_blocks: int
) -> None:
    token_ids, _, images = laid_out(parts)
    root, extras = root_hash("t", "w"), image_extras(images, block_size)
    full = extend_chain(root, token_ids, block_size, extras)
    cut = min(num_blocks, len(full))
    head = extend_chain(root, token_ids[: cut * block_size], block_size, extras)
    rest = token_ids[cut * block_size :]
    tail = extend_chain([root, *head][-1], rest, block_size, extras, first_block=cut)
    assert head + tail == full
