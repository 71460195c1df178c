"""Turn a folder of plain public-domain books into a tokenizer, a token file and a held-out text.

The input is a folder of `.txt` files in the layout of Project Gutenberg's plain text editions. For every book
the script

1. reads title, author and number from the header, and keeps nothing of the header, the licence or the footer;
2. removes illustration notes, transcriber's notes, footnote marks and emphasis marks, and writes quotation
   marks and dashes in ASCII;
3. joins the lines of each paragraph (verse keeps its lines), drops front matter, tables of contents and
   paragraphs that hold a racial slur, and drops every paragraph that an earlier book already contained;
4. puts `<|endoftext|>` before each chapter or story heading.

Books whose title is named with `--heldout` never reach the training file: their first characters become
`heldout.txt`, and any paragraph of theirs that appears in another book is removed from that book. The
remaining text trains a byte-level BPE tokenizer and is written as `train.bin`, a flat array of little-endian
uint16 ids; `sources.csv` lists the books.

Example:
    python prepare_data.py books/ --output data/ --heldout "The Olive Fairy Book" --heldout "The Magic World"
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LOG = logging.getLogger("prepare_data")
END_OF_TEXT = "<|endoftext|>"

START = re.compile(r"^\*\*\* ?START OF .*$|^\*END[* ]+THE SMALL PRINT.*$", re.MULTILINE | re.IGNORECASE)
END = re.compile(r"^\*\*\* ?END OF .*$|^\s*End of (?:the |this )?Project Gutenberg.*$", re.MULTILINE | re.IGNORECASE)
BRACKETS = re.compile(r"\[(?:Illustration|Transcriber|Footnote|Sidenote|Note|Frontispiece)[^\]]*\]", re.IGNORECASE)
NOTE_MARKS = re.compile(r"\[\w{1,3}\]|\{\d+\w?\}")
DROPPED = re.compile(
    r"gutenberg|transcriber|proofread|copyright|produced by|e-?text|all rights reserved|illustrated by|"
    r"\bnigg|\bdark(?:y|ey|ies)\b|\bpickaninn",
    re.IGNORECASE,
)
ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201a": "'",
        "\u201b": "'",
        "`": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2014": "--",
        "\u2013": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\ufeff": "",
        "\r": "",
        "_": "",
        "=": "",
    }
)


@dataclass
class Book:
    """One book: where it comes from and its cleaned paragraphs."""

    title: str
    author: str
    number: str
    paragraphs: list[str]


def read_header(text: str, stem: str) -> tuple[str, str, str]:
    """Return title, author and Project Gutenberg number (an empty string where unknown)."""
    head = text[:6000]
    title = re.search(r"^Title:\s*(.+)$", head, re.MULTILINE)
    people = re.findall(r"^(?:Author|Editor):\s*(.+)$", head, re.MULTILINE)
    number = re.search(r"\[e(?:book|text)[ #]*(\d+)\]", head, re.IGNORECASE)
    nameless = {"various", "anonymous", "unknown"}
    named = [name.strip() for name in people if name.strip().lower() not in nameless]
    return (
        title.group(1).strip() if title else stem,
        ", ".join(named) or stem.split(" - ")[0],
        number.group(1) if number else "",
    )


def clean(text: str) -> list[str]:
    """Return the paragraphs of a book's body."""
    starts = list(START.finditer(text))
    body = text[starts[-1].end() :] if starts and starts[-1].end() < len(text) // 2 else text
    ending = END.search(body)
    body = body[: ending.start()] if ending else body
    body = NOTE_MARKS.sub("", BRACKETS.sub("", body)).translate(ASCII)
    paragraphs = []
    for block in re.split(r"\n\s*\n", body):
        lines = [re.sub(r"\s+", " ", line).strip() for line in block.strip("\n").split("\n")]
        lines = [line for line in lines if line and not re.fullmatch(r"[\W\d]*", line)]
        if not lines:
            continue
        capitals = sum(line[0].isupper() for line in lines)
        verse = len(lines) > 1 and max(map(len, lines)) < 56 and capitals > 0.7 * len(lines)
        paragraph = ("\n" if verse else " ").join(lines)
        digits = sum(character.isdigit() for character in paragraph)
        if digits > 0.04 * len(paragraph) or DROPPED.search(paragraph):
            continue
        if re.search(r"(?:\. ){3}|\.{5}", paragraph):
            continue
        if max(map(len, paragraph.split())) > 40 or paragraph.strip("* ") in {"", "THE END", "FINIS"}:
            continue
        paragraphs.append(paragraph)
    prose = [len(p) > 220 and p[-1] in ".!?\"';:-" for p in paragraphs]
    first = next((i for i in range(len(prose) - 1) if prose[i] and any(prose[i + 1 : i + 3])), 0)
    return paragraphs[max(first - 1, 0) :]


def is_heading(paragraph: str) -> bool:
    """Tell whether a paragraph is a chapter or story heading."""
    if len(paragraph) > 80 or "\n" in paragraph or paragraph[-1] in ",;:":
        return False
    letters = [character for character in paragraph if character.isalpha()]
    return len(letters) > 3 and (paragraph.isupper() or paragraph.lower().startswith("chapter "))


def join(paragraphs: list[str]) -> str:
    """Join paragraphs, with an end-of-text mark before every heading that follows a body of text."""
    parts: list[str] = []
    since = 0
    for paragraph in paragraphs:
        if is_heading(paragraph) and since > 800:
            parts.append(f"{END_OF_TEXT}{paragraph}")
            since = 0
        else:
            parts.append(paragraph)
            since += len(paragraph)
    return "\n\n".join(parts).replace(f"\n\n{END_OF_TEXT}", END_OF_TEXT)


def drop_repeats(books: list[Book]) -> None:
    """Remove, in place, each long paragraph that an earlier book in the list already holds."""
    seen: set[bytes] = set()
    for book in books:
        kept = []
        for paragraph in book.paragraphs:
            letters = re.sub(r"[^a-z]", "", paragraph.lower())
            if len(letters) > 60:
                ends = (letters[:60], letters[-60:])
                keys = [hashlib.blake2b(part.encode(), digest_size=8).digest() for part in ends]
                if any(key in seen for key in keys):
                    continue
                seen.update(keys)
            kept.append(paragraph)
        book.paragraphs = kept


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in text.split(END_OF_TEXT)), trainer)
    return tokenizer


def main() -> None:
    """Run the preparation from the command line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("texts", type=Path, help="folder of plain text books, searched recursively")
    parser.add_argument("--output", type=Path, default=Path("data"), help="folder for the results")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens in the vocabulary")
    parser.add_argument("--heldout", action="append", default=[], help="title of a held-out book")
    parser.add_argument("--heldout-characters", type=int, default=60_000, help="characters kept of each")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    books = []
    for path in sorted(args.texts.rglob("*.txt")):
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = raw.decode("latin-1")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        books.append(Book(*read_header(text, path.stem), clean(text)))
    heldout = [book for book in books if book.title in args.heldout]
    if len(heldout) < len(set(args.heldout)):
        parser.error("a book named with --heldout was not found")
    training = [book for book in books if book.title not in args.heldout]
    drop_repeats(heldout + training)

    args.output.mkdir(parents=True, exist_ok=True)
    excerpts = []
    for book in heldout:
        text = join(book.paragraphs)
        cut = text.rfind("\n\n", 0, args.heldout_characters)
        excerpts.append(text[: cut if cut > 0 else None])
    heldout_text = END_OF_TEXT.join(excerpts).replace(END_OF_TEXT, "\n\n\n") + "\n"
    (args.output / "heldout.txt").write_text(heldout_text, encoding="utf-8")

    training = [book for book in training if sum(map(len, book.paragraphs)) > 2000]
    texts = [join(book.paragraphs) for book in training]
    tokenizer = train_tokenizer(texts, args.vocabulary)
    tokenizer.save(str(args.output / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    settings_text = json.dumps(settings, indent=2) + "\n"
    (args.output / "tokenizer_config.json").write_text(settings_text, encoding="utf-8")

    with (args.output / "sources.csv").open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["author", "title", "number", "characters", "use"])
        for book, use in [(b, "training") for b in training] + [(b, "held-out") for b in heldout]:
            writer.writerow([book.author, book.title, book.number, sum(map(len, book.paragraphs)), use])

    ids = [np.asarray(tokenizer.encode(END_OF_TEXT + text).ids, dtype="<u2") for text in texts]
    tokens = np.concatenate(ids)
    tokens.tofile(args.output / "train.bin")
    np.asarray(tokenizer.encode(heldout_text).ids, dtype="<u2").tofile(args.output / "heldout.bin")
    LOG.info(
        "%d books, %.1f MB of training text, %d training tokens, %d held-out characters",
        len(training),
        sum(map(len, texts)) / 1e6,
        len(tokens),
        len(heldout_text),
    )


if __name__ == "__main__":
    main()
