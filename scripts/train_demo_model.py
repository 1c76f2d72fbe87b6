"""Train the demo model of Hearth: a small Llama that answers questions about serving.

The script reads question and answer pairs from ``scripts/demo_corpus/*.toml``, trains a byte-level
BPE tokenizer and a Llama-architecture model of about five million parameters on them, and writes a
checkpoint in the Hugging Face layout. Everything random comes from one seed, so the same machine
writes the same bytes again.

    python scripts/train_demo_model.py                # train, about 40 minutes on one CPU core
    python scripts/train_demo_model.py --evaluate     # score the checkpoint that exists

The files ``held_out_*.toml`` hold paraphrases that are used only by ``--evaluate``.

Shape letters in this file: B rows of a batch, T positions, D hidden size, H query heads, K key and
value heads, C channels of one head, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import string
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "scripts" / "demo_corpus"
TRAINING_FILES = ("serving", "hearth", "using", "systems", "unknown")
HELD_OUT_FILES = ("serving", "hearth", "using", "systems")
UNKNOWN = "unknown"

BOS, USER, ASSISTANT, SYSTEM, END, PAD = SPECIALS = (
    "<|bos|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|pad|>",
)

CHAT_TEMPLATE = """\
{{- '<|bos|>' -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] | trim) ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


# ------------------------------------------------------------------------------------ corpus


@dataclass(frozen=True)
class Unit:
    """Turns that belong together: one question with its answer, or a short conversation."""

    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Corpus:
    """All training text: single questions, conversations, and the answer to unknown prompts."""

    questions: tuple[Unit, ...]
    conversations: tuple[Unit, ...]
    answers: dict[str, str]  # "file:id" -> answer
    unknown_answer: str

    def texts(self) -> list[str]:
        """Return every question and every answer once, for the tokenizer."""
        units = self.questions + self.conversations
        return list(dict.fromkeys(text for unit in units for turn in unit.turns for text in turn))


def read_toml(path: Path) -> dict[str, Any]:
    """Read one corpus file, which must be plain ASCII."""
    return tomllib.loads(path.read_bytes().decode("ascii"))


def normalise(question: str) -> str:
    """Return a question without case, punctuation and surplus space, to find duplicates."""
    return " ".join(re.findall(r"[a-z0-9_./\[\]-]+", question.lower())).rstrip(".")


def load_corpus(folder: Path) -> Corpus:
    """Read the training files; a question that appears twice is an error."""
    questions, conversations, answers = [], [], {}
    seen: dict[str, str] = {}
    for name in TRAINING_FILES:
        data = read_toml(folder / f"{name}.toml")
        for pair in data["pair"]:
            key = f"{name}:{pair['id']}"
            assert key not in answers, f"two pairs are named {key}"
            answers[key] = pair["answer"]
            for question in pair["questions"]:
                form = normalise(question) or question
                assert form not in seen, f"{question!r} is in {seen[form]} and in {key}"
                seen[form] = key
                questions.append(Unit(((question, pair["answer"]),)))
        for conversation in data.get("conversation", []):
            conversations.append(Unit(tuple((q, a) for q, a in conversation["turns"])))
    unknown_answer = answers[f"{UNKNOWN}:{UNKNOWN}"]
    return Corpus(tuple(questions), tuple(conversations), answers, unknown_answer)


def load_held_out(folder: Path, corpus: Corpus) -> list[tuple[str, str]]:
    """Read the held-out paraphrases as (question, answer); none may be a trained question."""
    trained = {normalise(unit.turns[0][0]) for unit in corpus.questions}
    held_out = []
    for name in HELD_OUT_FILES:
        for entry in read_toml(folder / f"held_out_{name}.toml")["paraphrase"]:
            question = entry["question"]
            assert normalise(question) not in trained, f"held-out question is trained: {question!r}"
            held_out.append((question, corpus.answers[f"{name}:{entry['id']}"]))
    return held_out


# --------------------------------------------------------------------------- augmented questions


def split(text: str) -> tuple[str, ...]:
    """Split a list that is written as one string with bars."""
    return tuple(text.split("|"))


# Ways to ask for an explanation; a leading one may be exchanged for any other.
EXPLAIN = split(
    "what is|what are|explain|describe|define|tell me about|what does it mean:|"
    "what do you mean by|what is meant by|can you explain|could you explain|could you describe|"
    "give me a short explanation of|i want to know about|help me understand|"
    "what do you know about|say something about|what exactly is|introduce|info on|"
)
PREFIXES = split(
    "please|hey,|hi,|hello,|so|ok,|and|well,|now|can you tell me|could you tell me|tell me|"
    "i would like to know|i want to know|i wonder|do you know|quick question:|one question:|"
    "just curious,|sorry,|in short,|briefly,|explain to me|in simple words,"
)
SUFFIXES = split(
    "please|exactly|in short|briefly|in simple words|in one sentence|then|actually|"
    "for a beginner|for me|thanks"
)
STOP_WORDS = frozenset(
    split(
        "a|an|and|are|at|be|can|could|did|do|does|for|from|has|have|how|i|if|in|is|it|its|me|my|"
        "of|on|or|please|so|that|the|then|there|this|to|was|what|when|which|will|with|would|you|your"
    )
)
# Words that often stand for each other in a question; one may replace another of its group.
SYNONYMS = tuple(
    split(group)
    for group in (
        "use|using|make use of|work with",
        "used|utilised|applied",
        "why|for what reason|how come|what is the reason that",
        "purpose|point|goal|aim|role|job|use",
        "difference|distinction",
        "differ|vary",
        "big|large|huge",
        "small|little|tiny",
        "fast|quick|rapid|speedy",
        "faster|quicker|speedier",
        "slow|sluggish",
        "start|launch|run|begin|bring up|boot",
        "stop|end|halt|quit|shut down|terminate|kill",
        "dies|crashes|fails|goes down|breaks|is killed",
        "die|crash|fail|go down",
        "lost|gone|dropped",
        "happens|occurs|takes place",
        "need|require|want",
        "needs|requires",
        "needed|required|necessary",
        "show|display|see|view|look at",
        "get|obtain|receive",
        "send|submit|post|transmit",
        "sends|submits|transmits",
        "set|choose|pick|configure|change",
        "change|alter|modify",
        "machine|computer|host|server|box",
        "machines|computers|hosts|servers",
        "many|multiple|several",
        "gpu|graphics card|accelerator",
        "gpus|graphics cards",
        "cpu|processor",
        "prompt|input",
        "answer|reply|response|output",
        "answers|replies|responses",
        "request|query|call",
        "requests|queries|calls",
        "keep|hold|store|save",
        "keeps|holds|stores",
        "kept|held|stored|saved",
        "mean|stand for|signify",
        "meaning|definition|sense",
        "work|function|operate",
        "works|functions|operates",
        "option|flag|switch|setting|parameter|argument",
        "command|subcommand",
        "folder|directory",
        "error|failure|fault|problem",
        "help|assist",
        "helps|improves",
        "important|useful|relevant",
        "matter|count",
        "check|test|verify|make sure",
        "measure|benchmark|determine",
        "measured|computed|calculated|determined",
        "split|divide|separate|partition",
        "join|connect to|become part of",
        "together|jointly",
        "different|other|another",
        "same|identical|equal",
        "limit|cap|bound|restrict",
        "length|size",
        "memory|ram|space",
        "speed|performance",
        "move|transfer|copy|ship",
        "moves|transfers|travels",
        "build|create|make|construct",
        "built|made|created|constructed",
        "allowed|permitted|ok",
        "know|find out|learn",
        "tell|inform",
        "list|name|enumerate",
        "possible|feasible",
        "worker|process|service",
        "workers|processes",
        "model|llm|language model",
        "words|text",
        "example|instance",
        "compare|contrast",
        "compared to|versus|vs",
        "and|versus|vs",
        "benefit|advantage|gain",
        "cost|price|expense",
        "reduce|lower|decrease|cut|shrink",
        "increase|raise|grow|boost",
        "avoid|prevent",
        "wait|delay",
        "protect|guard|secure",
        "user|client|customer|person",
        "users|clients|people|customers",
        "tenants|customers|users",
        "data|information",
        "code|source",
        "licence|license",
        "explain|describe|clarify",
        "do not|don't",
        "what is|what's|whats",
        "how do i|how can i|how could i|how to|what must i do to|how does one|how should i",
        "can i|may i|could i|am i able to|is it possible to",
        "which|what",
        "where|in which place",
        "when|at what point|in which case",
        "who|which person",
    )
)
SYNONYM_OF = {
    word: tuple(other for other in group if other != word) for group in SYNONYMS for word in group
}
SYNONYM_PATTERN = re.compile(
    r"(?<![\w-])("
    + "|".join(sorted(map(re.escape, SYNONYM_OF), key=len, reverse=True))
    + r")(?![\w-])",
    re.IGNORECASE,
)
EXPLAIN_PATTERN = re.compile(
    r"^(what is|what are|explain|describe|define|tell me about|what exactly is)"
    r"( an?| the)? (?P<subject>.+?)( to me| for me| please)?[?.!]*$",
    re.IGNORECASE,
)


class Augmenter:
    """Rewrites questions the way different people would type them; answers never change."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self.rng = rng
        self.answer_of = {normalise(u.turns[0][0]): u.turns[0][1] for u in corpus.questions}
        self.questions_of: dict[str, list[str]] = {}
        for unit in corpus.questions:
            question, answer = unit.turns[0]
            self.questions_of.setdefault(answer, []).append(question)
        self.content_words = {
            answer: content_words(answer)
            for answer in self.questions_of
            if answer != corpus.unknown_answer
        }
        self.unknown_answer = corpus.unknown_answer

    def __call__(self, question: str, answer: str) -> str:
        """Return a variant of a question that no other answer claims."""
        variant = self.rewrite(question, answer)
        return variant if self.answer_of.get(normalise(variant), answer) == answer else question

    def rewrite(self, question: str, answer: str) -> str:
        """Apply a random mix of rewrites; about a quarter of all questions stay as they are."""
        chance = self.rng.random
        if chance() < 0.25:
            return question
        if answer not in self.content_words:
            return self.typing_habits(question)
        if chance() < 0.08:
            return self.typing_habits(self.keywords(answer))
        if chance() < 0.08:
            question = self.join_two(question, answer)
        if chance() < 0.35:
            question = self.change_opening(question)
        if chance() < 0.5:
            question = self.swap_synonyms(question)
        if chance() < 0.4:
            question = self.drop_words(question)
        if chance() < 0.25:
            question = f"{self.rng.choice(PREFIXES)} {lower_first(question)}"
        if chance() < 0.15:
            question = f"{question.rstrip('?.! ')} {self.rng.choice(SUFFIXES)}"
        return self.typing_habits(question)

    def keywords(self, answer: str) -> str:
        """Ask with a few words of the answer itself, as a person does who half remembers it."""
        words = self.content_words[answer]
        count = min(len(words), self.rng.randint(3, 6))
        picked = sorted(self.rng.sample(range(len(words)), count))
        return f"{self.rng.choice(EXPLAIN)} {' '.join(words[i] for i in picked)}".strip()

    def join_two(self, question: str, answer: str) -> str:
        """Put two questions with the same answer, or halves of them, one after the other."""
        other = self.rng.choice(self.questions_of[answer])
        if self.rng.random() < 0.5:
            return f"{question} {other}"
        first, second = question.rstrip("?.!").split(), other.split()
        return " ".join(first[: (len(first) + 1) // 2] + second[len(second) // 2 :])

    def change_opening(self, question: str) -> str:
        """Exchange one way of asking for an explanation for another one."""
        match = EXPLAIN_PATTERN.match(question)
        if match is None:
            return question
        article = self.rng.choice(("", "", "the ", "a "))
        return f"{self.rng.choice(EXPLAIN)} {article}{match['subject']}".strip()

    def swap_synonyms(self, question: str) -> str:
        """Exchange about half of the words that have a synonym."""

        def swap(match: re.Match[str]) -> str:
            word = match.group(0)
            return self.rng.choice(SYNONYM_OF[word.lower()]) if self.rng.random() < 0.5 else word

        return SYNONYM_PATTERN.sub(swap, question)

    def drop_words(self, question: str) -> str:
        """Leave out some stop words, and now and then one other word of a longer question."""
        words = question.split()
        kept = [w for w in words if w.lower() not in STOP_WORDS or self.rng.random() > 0.35]
        if len(kept) > 4 and self.rng.random() < 0.3:
            kept.pop(self.rng.randrange(len(kept)))
        return " ".join(kept) or question

    def typing_habits(self, question: str) -> str:
        """Vary case and punctuation, and make one typing mistake in every eighth question."""
        chance = self.rng.random
        if chance() < 0.12:
            question = self.typing_mistake(question)
        if chance() < 0.45:
            question = question.lower()
        elif chance() < 0.06:
            question = question.upper()
        elif chance() < 0.4:
            question = question[:1].upper() + question[1:]
        if chance() < 0.5:
            question = question.rstrip("?.! ") + self.rng.choice(("", "", "?", "?", "?", ".", "!"))
        return question

    def typing_mistake(self, text: str) -> str:
        """Drop, double, swap or replace one letter of a word with at least four letters."""
        places = [m.start() + self.rng.randrange(1, 3) for m in re.finditer(r"[A-Za-z]{4,}", text)]
        if not places:
            return text
        i = self.rng.choice(places)
        edits = (
            text[:i] + text[i + 1 :],
            text[:i] + text[i] + text[i:],
            text[:i] + text[i + 1] + text[i] + text[i + 2 :],
            text[:i] + self.rng.choice(string.ascii_lowercase) + text[i + 1 :],
        )
        return self.rng.choice(edits)


def content_words(text: str) -> list[str]:
    """Return the words of a text that carry meaning, in order and without repeats."""
    words = re.findall(r"[A-Za-z0-9_/-]+", text)
    return list(dict.fromkeys(w for w in words if w.lower() not in STOP_WORDS and len(w) > 2))


def lower_first(text: str) -> str:
    """Lower the first letter unless the first word is an abbreviation or a name."""
    return text if text[:2].isupper() or text.startswith("Hearth") else text[:1].lower() + text[1:]


# ------------------------------------------------------------------------------------- filler

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a helpful, honest and friendly assistant.",
    "You are an assistant. Be concise.",
    "You are the demo assistant of Hearth.",
    "Answer the question of the user.",
    "Answer in one sentence.",
    "Be brief.",
    "You answer questions about serving language models.",
    "You are a chat bot that explains how language models are served.",
    "You are a careful engineer. Give short and correct answers, and do not guess.",
    "Today is Monday. The user is a new member of the team. Explain things in plain words.",
    "Be polite, use simple English, keep every answer short, and never invent facts.",
)
TOPICS = split(
    "dogs|cats|water|fire|football|tennis|France|Japan|London|the moon|the sun|the ocean|love|"
    "music|pizza|bread|coffee|chocolate|cooking|gardening|painting|history|physics|chemistry|biology|"
    "geography|politics|religion|economics|the stock market|money|taxes|my homework|my boss|"
    "my friend|my cat|my health|sleep|dreams|holidays|travel|a hotel|a flight|cars|bicycles|trains|"
    "ships|aeroplanes|dinosaurs|insects|birds|fish|horses|flowers|mushrooms|mountains|rivers|"
    "volcanoes|the weather|snow|a guitar|the piano|an opera|films|novels|poetry|Shakespeare|"
    "Napoleon|Mozart|Cleopatra|a birthday party|a wedding|shoes|clothes|furniture|chess|card games|"
    "video games|the Olympic games|quantum physics|algebra|the number seven|Linux|Windows|Excel|"
    "Java|blockchain|bitcoin|a smartphone|a television|Kubernetes|web design|email|photography|"
    "the brain|the heart|vitamins|a headache|school|university|a job interview|philosophy|happiness"
)
TOPIC_QUESTIONS = split(
    "how do I learn about {}|can you help me with {}|where can I buy {}|write a poem about {}|"
    "what is your opinion on {}|do you like {}|who invented {}|why do people like {}|"
    "how old is {}|how much does {} cost|what do you think about {}|how do I install {}|"
    "when was {} discovered|what is the history of {}|how many kinds of {} are there|"
    "give me some facts about {}|write a story about {}|what is the best book about {}|"
    "how do I take care of {}|is {} dangerous|translate {} into German|{}"
)
PERSONAS = split(
    "a pirate|a poet|a teacher|a doctor|a lawyer|a travel guide|a cook|a comedian|a scientist|"
    "a librarian|an expert|a translator|an old wizard|a news reader|a programmer|a friend"
)
MANNERS = split(
    "Speak in rhymes.|Use markdown.|Always be cheerful.|Answer step by step.|Use formal language.|"
    "Do not use lists.|Never mention the weather.|Follow the instructions carefully.|"
    "Think before you answer.|Keep secrets.|Explain like I am five.|Answer only with facts.|"
    "The current date is 2024-01-01.|Knowledge cutoff: 2023-04.|Use British spelling."
)
WHO = split(
    "The old man|A young woman|My neighbour|The teacher|The farmer|A small dog|The captain|"
    "The quick brown fox|Our friend|The baker|A tall tree|The river|The king|The ship|"
    "Every visitor|The cat|A student|The doctor|The garden|The train"
)
DOES = split(
    "walked to|looked at|waited near|jumps over|remembered|sang about|painted|left|came from|"
    "found|watched|lived beside|carried|wrote about|asked for|returned to|crossed"
)
WHAT = split(
    "the village|the lazy dog|a red house|the blue mountains|the market|the sea|an empty street|"
    "the long bridge|a bag of apples|the station|the library|a field of wheat|the old clock|"
    "the harbour|a warm fire|the northern road|a letter|the castle"
)
WHERE = split(
    "in the morning|at night|before the rain|during the long winter|after dinner|last summer|"
    "on a cold day|without a word|with great care|for many years|as the sun went down|again"
)


ALPHABETS = (
    string.ascii_lowercase,
    string.ascii_letters,
    string.digits,
    string.printable[:94],
    "".join(map(chr, range(0x00E0, 0x0100))),  # Latin letters with accents
    "".join(map(chr, range(0x0430, 0x0450))),  # Cyrillic
    "".join(map(chr, range(0x4E00, 0x4F00))),  # Chinese
    "".join(map(chr, range(0x1F600, 0x1F640))),  # emoji
)


class Filler:
    """Makes text without meaning for the model, so that long contexts do not disturb it."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self.rng = rng
        self.answers = sorted(set(corpus.answers.values()))
        self.words = sorted({w for text in corpus.texts() for w in text.split()})

    def plain_sentence(self) -> str:
        """Return an everyday English sentence."""
        parts = (self.rng.choice(options) for options in (WHO, DOES, WHAT, WHERE))
        return " ".join(parts) + "."

    def off_topic(self) -> str:
        """Return a question about something that the corpus does not cover."""
        frames = TOPIC_QUESTIONS if self.rng.random() < 0.6 else [f"{e} {{}}" for e in EXPLAIN]
        question = self.rng.choice(frames).format(self.rng.choice(TOPICS)).strip()
        if self.rng.random() < 0.5:
            question = question[:1].upper() + question[1:]
        return question + self.rng.choice(("", "?", "?", "."))

    def system_message(self) -> str:
        """Return a system message, usual or strange."""
        if self.rng.random() < 0.5:
            return self.rng.choice(SYSTEM_MESSAGES)
        if self.rng.random() < 0.3:
            return self.prose(self.rng.randint(1, 40))
        manners = " ".join(self.rng.sample(MANNERS, self.rng.randint(0, 3)))
        return f"You are {self.rng.choice(PERSONAS)}. {manners}".strip()

    def gibberish(self, count: int) -> str:
        """Return words made of random letters or digits."""
        letters = self.rng.choice(ALPHABETS)
        sizes = (self.rng.randint(1, 9) for _ in range(count))
        return " ".join("".join(self.rng.choices(letters, k=size)) for size in sizes)

    def prose(self, words: int) -> str:
        """Return running text of about this many words, in one of several styles."""
        style = self.rng.choice(("plain", "plain", "answers", "repeat", "salad", "gibberish"))
        if style == "gibberish":
            return self.gibberish(words // 3 + 1)
        if style == "salad":
            return " ".join(self.rng.choices(self.words, k=words))
        if style == "repeat":
            sentence = self.rng.choice((self.plain_sentence(), self.rng.choice(self.answers)))
            return " ".join([sentence] * (words // len(sentence.split()) + 1))
        sentences: list[str] = []
        while words > 0:
            plain = style == "plain"
            sentences.append(self.plain_sentence() if plain else self.rng.choice(self.answers))
            words -= len(sentences[-1].split())
        return " ".join(sentences)


# ---------------------------------------------------------------------------------- tokenizer


def train_tokenizer(corpus: Corpus, vocabulary: int) -> Tokenizer:
    """Train byte-level BPE; all 256 bytes are in the vocabulary, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = corpus.texts()
    everyday = [" ".join((*WHO, *DOES, *WHAT, *WHERE, *SYSTEM_MESSAGES, *PREFIXES, *TOPICS))]
    lower = [unit.turns[0][0].lower() for unit in corpus.questions]
    tokenizer.train_from_iterator(texts + lower + everyday, trainer)
    return tokenizer


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """Return the id of a special token."""
    number = tokenizer.token_to_id(name)
    assert number is not None, f"the tokenizer lacks {name}"
    return number


# ------------------------------------------------------------------------------------ batches


@dataclass(frozen=True)
class RowKind:
    """Rows of one length: T positions, B rows in a batch, and how often such a batch is drawn."""

    length: int
    rows: int
    share: float


SHORT_ROWS = (
    RowKind(length=32, rows=96, share=0.40),
    RowKind(length=112, rows=28, share=0.31),
    RowKind(length=256, rows=12, share=0.22),
    RowKind(length=1024, rows=2, share=0.07),
)
LONG_ROWS = (
    RowKind(length=32, rows=96, share=0.30),
    RowKind(length=112, rows=28, share=0.35),
    RowKind(length=512, rows=6, share=0.14),
    RowKind(length=2048, rows=2, share=0.12),
    RowKind(length=8192, rows=1, share=0.09),
)
LONG_PHASE = 0.8  # the part of the training after which LONG_ROWS are drawn
QUESTION_WEIGHT = 0.1  # of the loss on question tokens, against 1 for answer tokens
CONVERSATION_COPIES = 4  # how often a conversation is in the deck, against 1 for a question


class Row:
    """One row under construction: token ids, and the weight of each as a prediction target."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []

    def add(self, ids: Iterable[int], weight: float) -> None:
        """Append tokens that all carry the same loss weight."""
        before = len(self.ids)
        self.ids.extend(ids)
        self.weights.extend([weight] * (len(self.ids) - before))


class Batches:
    """Draws training batches: rows of dialogue, filled with random turns and cut to one length."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.augment = Augmenter(corpus, self.rng)
        self.filler = Filler(corpus, self.rng)
        self.special = {name: special_id(tokenizer, name) for name in SPECIALS}
        self.answer_ids = {a: self.encode(a) for u in self.units() for _, a in u.turns}
        self.deck: list[Unit] = []

    def units(self) -> tuple[Unit, ...]:
        """Return what one pass over the corpus draws."""
        return self.corpus.questions + self.corpus.conversations * CONVERSATION_COPIES

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ordinary text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def next_unit(self) -> Unit:
        """Take a unit from the shuffled deck."""
        if not self.deck:
            self.deck = list(self.units())
            self.rng.shuffle(self.deck)
        return self.deck.pop()

    def message(self, row: Row, role: str, ids: list[int], weight: float) -> None:
        """Append one message as the chat template writes it."""
        row.add([self.special[role]], 0.0)
        row.add([*ids, self.special[END]], weight)

    def turn(self, row: Row, question: str, answer_ids: list[int]) -> None:
        """Append a question and its answer."""
        self.message(row, USER, self.encode(question.strip()), QUESTION_WEIGHT)
        self.message(row, ASSISTANT, answer_ids, 1.0)

    def unit(self, row: Row) -> None:
        """Append the turns of the next unit, or now and then a prompt without meaning."""
        if self.rng.random() < 0.06:
            gibberish = self.filler.gibberish(self.rng.randint(1, 12))
            off_topic = self.filler.off_topic()
            text = self.rng.choice((gibberish, self.filler.plain_sentence(), off_topic, off_topic))
            self.turn(row, text, self.answer_ids[self.corpus.unknown_answer])
            return
        for question, answer in self.next_unit().turns:
            self.turn(row, self.augment(question, answer), self.answer_ids[answer])

    def opening(self, row: Row, length: int) -> None:
        """Append what may stand before the turns: a system message, or a prompt with filler."""
        choice, long = self.rng.random(), length >= 256
        prose = self.filler.prose(int(length * self.rng.uniform(0.1, 0.7))) if long else ""
        if choice < 0.4:
            text = self.filler.system_message() if length >= 64 else SYSTEM_MESSAGES[0]
            text = self.rng.choice((text, f"{text} {prose}".strip()))
            self.message(row, SYSTEM, self.encode(text)[: max(40, length - 100)], 0.0)
        elif choice < 0.6 and long:
            if self.rng.random() < 0.2:
                question, answer = "", self.corpus.unknown_answer
            else:
                question, answer = self.rng.choice(self.corpus.questions).turns[0]
                question = self.rng.choice(("\n\n", "\n", " ")) + self.augment(question, answer)
            ids = self.encode(prose)[: length - 100] + self.encode(question)
            self.message(row, USER, ids, 0.0)
            self.message(row, ASSISTANT, self.answer_ids[answer], 1.0)

    def plain_text(self, length: int) -> Row:
        """Make a row of answers as running text, for completions without a chat template.

        Half of the texts begin with the first words of another sentence, so that the model comes
        back to sentences that it knows.
        """
        row = Row()
        row.add([self.special[BOS]] * self.rng.randint(0, 1), 0.0)
        while len(row.ids) <= length:
            text = " ".join(self.rng.sample(self.filler.answers, k=self.rng.randint(1, 3)))
            if self.rng.random() < 0.5:
                words = self.filler.prose(8).split()
                row.add(self.encode(" ".join(words[: self.rng.randint(1, 8)])), 0.0)
                text = f" {text}"
            row.add([*self.encode(text), self.special[END]], 1.0)
        return row

    def row(self, length: int) -> Row:
        """Make a row of more than ``length`` tokens."""
        if self.rng.random() < 0.05:
            return self.plain_text(length)
        row = Row()
        row.add([self.special[BOS]], 0.0)
        self.opening(row, length)
        while len(row.ids) <= length:
            self.unit(row)
        return row

    def batch(self, kinds: tuple[RowKind, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs [B, T], targets [B, T] and the loss weights [B, T] of the targets."""
        (kind,) = self.rng.choices(kinds, weights=[k.share for k in kinds])
        rows = [self.row(kind.length) for _ in range(kind.rows)]
        ids = torch.tensor([row.ids[: kind.length + 1] for row in rows])
        weights = torch.tensor([row.weights[: kind.length + 1] for row in rows])
        return ids[:, :-1], ids[:, 1:], weights[:, 1:]


# -------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, by the names of the Hugging Face Llama configuration."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 704
    max_position_embeddings: int = 8192
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-5


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, C] of rotary embeddings (arXiv:2104.09864)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    positions = torch.arange(shape.max_position_embeddings, dtype=torch.float32)
    angles = positions[:, None] / shape.rope_theta ** exponents[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head: x [B, heads, T, C], cos and sin [T, C]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """Split [B, T, heads * C] into [B, heads, T, C]."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        value = self.heads(self.v_proj(x)).repeat_interleave(groups, dim=1)
        query = rotate(self.heads(self.q_proj(x)), cos, sin).to(value.dtype)
        key = rotate(self.heads(self.k_proj(x)), cos, sin).to(value.dtype)
        key = key.repeat_interleave(groups, dim=1)
        attend = plain_attention if x.shape[1] <= 512 else flash_attention
        return self.o_proj(attend(query, key, value).transpose(1, 2).flatten(2))


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with the whole score matrix; on a CPU this is the faster way for short rows."""
    length = query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.masked_fill(hidden, -math.inf).softmax(-1).to(value.dtype) @ value


def flash_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend tile by tile, so that long rows fit into memory."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class FeedForward(nn.Module):
    """Gated feed-forward network, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One transformer layer with norms before its two parts."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are those of Hugging Face without "model."."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        layers = (Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.cos, self.sin = rotary_table(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * shape.num_hidden_layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [B, T] to the hidden states [B, T, D] before the output matrix."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean cross-entropy; all three arguments are [B, T]."""
        chosen = weights > 0
        logits = functional.linear(self(ids)[chosen], self.embed_tokens.weight)
        losses = functional.cross_entropy(logits.float(), targets[chosen], reduction="none")
        return (losses * weights[chosen]).sum() / weights[chosen].sum()


# ----------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Recipe:
    """What a training run depends on besides the corpus."""

    steps: int = 2000
    seed: int = 7
    dropout: float = 0.1
    matrix_rate: float = 4e-3
    other_rate: float = 3e-3
    weight_decay: float = 0.1
    warm_up: int = 50


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the factor of the learning rate: a linear rise, then half a cosine down to 1%."""
    if step < recipe.warm_up:
        return (step + 1) / recipe.warm_up
    part = (step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * part)) / 2


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Use Muon for the matrices inside the layers, and AdamW for embeddings and norms."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        torch.optim.Muon(
            matrices,
            lr=recipe.matrix_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train_model(corpus: Corpus, tokenizer: Tokenizer, shape: Shape, recipe: Recipe) -> Llama:
    """Train a model from random weights, showing the loss on a progress bar."""
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    model = Llama(shape, recipe.dropout).train()
    optimizers = make_optimizers(model, recipe)
    batches = Batches(corpus, tokenizer, recipe.seed)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, recipe))
        for optimizer in optimizers
    ]
    for step in progress_bar(recipe.steps):
        kinds = SHORT_ROWS if step.number < LONG_PHASE * recipe.steps else LONG_ROWS
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(*batches.batch(kinds))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        step.loss = loss.item()
    return model.eval()


@dataclass
class Step:
    """One step of the training, which reports its loss back to the progress bar."""

    number: int
    loss: float = math.nan


def progress_bar(steps: int) -> Iterator[Step]:
    """Yield the steps while drawing a bar; without a terminal, print a line now and then."""
    console = Console()
    columns = (
        TextColumn("training"),
        BarColumn(bar_width=40),
        TextColumn("{task.completed}/{task.total}  loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    average, start = math.nan, time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, loss=average)
        for number in range(steps):
            step = Step(number)
            yield step
            average = step.loss if math.isnan(average) else 0.97 * average + 0.03 * step.loss
            progress.update(task, advance=1, loss=average)
            if not console.is_terminal and ((number + 1) % 100 == 0 or number + 1 == steps):
                seconds = time.monotonic() - start
                print(f"step {number + 1}/{steps}  loss {average:.4f}  {seconds:.0f} s", flush=True)


# ------------------------------------------------------------------------------------- export


def model_config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of config.json."""
    sizes = {k: v for k, v in vars(shape).items() if k != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        **token_ids(tokenizer),
    }


def token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that begin, end and fill a sequence."""
    return {
        "bos_token_id": special_id(tokenizer, BOS),
        "eos_token_id": special_id(tokenizer, END),
        "pad_token_id": special_id(tokenizer, PAD),
    }


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }


def save_checkpoint(out: Path, model: Llama, tokenizer: Tokenizer, shape: Shape) -> None:
    """Write the checkpoint folder, with all weights rounded to BF16."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        f"model.{name}": tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    (out / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    files = {
        "config.json": model_config(shape, tokenizer),
        "generation_config.json": {"do_sample": False, **token_ids(tokenizer)},
        "tokenizer_config.json": tokenizer_config(shape),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


# --------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Case:
    """A list of chat messages and the answer that is expected."""

    messages: tuple[dict[str, str], ...]
    answer: str


def chat(*contents: str, system: str | None = None) -> tuple[dict[str, str], ...]:
    """Return messages that alternate between user and assistant."""
    head = () if system is None else ({"role": "system", "content": system},)
    roles = ("user", "assistant")
    return head + tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents))


def conversation_cases(corpus: Corpus) -> list[Case]:
    """Return every turn of every conversation, with the turns before it as history."""
    cases = []
    for unit in corpus.conversations:
        flat = [text for turn in unit.turns for text in turn]
        for i in range(0, len(flat), 2):
            cases.append(Case(chat(*flat[: i + 1]), flat[i + 1]))
    return cases


def long_cases(corpus: Corpus, tokenizer: Any, length: int, count: int) -> list[Case]:
    """Return trained questions after contexts of about ``length`` tokens of three kinds."""
    rng = random.Random(length)
    filler = Filler(corpus, rng)
    cases = []
    for number in range(count):
        question, answer = rng.choice(corpus.questions).turns[0]
        history: list[str] = []
        while sum(len(tokenizer.encode(text)) + 2 for text in history) < length - 200:
            if number % 3 == 0:
                history.extend(rng.choice(corpus.questions).turns[0])
            else:
                history.append(filler.prose(60) if number % 2 else filler.plain_sentence())
        if number % 3 == 0:
            messages = chat(*history, question)
        elif number % 3 == 1:
            messages = chat(question, system=" ".join(history))
        else:
            messages = chat(" ".join(history) + f"\n\n{question}")
        cases.append(Case(messages, answer))
    return cases


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, cases: list[Case], rows: int = 64) -> list[str]:
    """Answer every case with greedy decoding, batching the cases of equal prompt length."""
    prompts: dict[int, list[tuple[int, list[int]]]] = {}
    for index, case in enumerate(cases):
        text = tokenizer.apply_chat_template(
            list(case.messages), add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.setdefault(len(ids), []).append((index, ids))
    outputs = [""] * len(cases)
    for length, group in prompts.items():
        for start in range(0, len(group), rows if length < 1000 else 1):
            part = group[start : start + (rows if length < 1000 else 1)]
            batch = torch.tensor([ids for _, ids in part])
            mask = torch.ones_like(batch)
            result = model.generate(batch, attention_mask=mask, max_new_tokens=96, do_sample=False)
            for (index, _), ids in zip(part, result[:, length:], strict=True):
                outputs[index] = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return outputs


def evaluate(folder: Path, corpus: Corpus, show_misses: bool) -> None:
    """Print how many answers of the BF16 checkpoint match exactly, per kind of question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out = load_held_out(CORPUS, corpus)
    groups = {
        "trained questions": [Case(chat(u.turns[0][0]), u.turns[0][1]) for u in corpus.questions],
        "held-out paraphrases": [Case(chat(q), a) for q, a in held_out],
        "conversation turns": conversation_cases(corpus),
        "after 2,000 tokens": long_cases(corpus, tokenizer, 2000, 18),
        "after 8,000 tokens": long_cases(corpus, tokenizer, 8000, 18),
    }
    known = {answer.strip() for answer in corpus.answers.values()}
    known |= {answer for unit in corpus.conversations for _, answer in unit.turns}
    for name, cases in groups.items():
        outputs = generate(model, tokenizer, cases)
        misses = [(c, o) for c, o in zip(cases, outputs, strict=True) if o != c.answer.strip()]
        strange = sum(output not in known for output in outputs)
        right = len(cases) - len(misses)
        print(
            f"{name:22} {right:5}/{len(cases):<5} {100 * right / len(cases):6.2f}% exact, "
            f"{strange} answers that are not in the corpus",
            flush=True,
        )
        if show_misses:
            for case, output in misses:
                print(f"  asked    {case.messages[-1]['content'][-160:]!r}")
                print(f"  expected {case.answer!r}\n  got      {output!r}\n")


# --------------------------------------------------------------------------------------- main


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model of Hearth.")
    parser.add_argument("--out", type=Path, default=ROOT / "shared" / "demo_model")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--evaluate", action="store_true", help="score --out instead of training")
    parser.add_argument("--misses", action="store_true", help="with --evaluate, print all misses")
    return parser.parse_args()


def main() -> None:
    """Train and save, or evaluate."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    corpus = load_corpus(CORPUS)
    if arguments.evaluate:
        evaluate(arguments.out, corpus, arguments.misses)
        return
    start = time.monotonic()
    shape = Shape()
    tokenizer = train_tokenizer(corpus, shape.vocab_size)
    recipe = Recipe(steps=arguments.steps, seed=arguments.seed)
    model = train_model(corpus, tokenizer, shape, recipe)
    save_checkpoint(arguments.out, model, tokenizer, shape)
    size = (arguments.out / "model.safetensors").stat().st_size
    minutes = (time.monotonic() - start) / 60
    print(f"wrote {arguments.out} in {minutes:.1f} minutes, weights {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
