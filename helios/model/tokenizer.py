# Generated from notebooks/02_tokens.ipynb by `helios export`; edit the notebook.
"""Tokens and chat templates, streamed safely.

A model reads and writes token ids; people read and write text. This notebook builds the two ways
across: text and chat messages to ids, in which nobody's text can pass for a control token, and ids
back to text, one at a time, in which no character is split and no stop string leaks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from helios.model.chat import ChatError as ChatError  # the engine and the server look for it here
from helios.model.chat import ChatTemplate, read_templates
from helios.model.errors import ModelError, damaged, read_json
from helios.model.marked import LONE_SURROGATES, Marked, mark, unmark

__all__ = [
    "SPECIAL_NAMES",
    "Tokenizer",
    "alternatives",
    "byte_alphabet",
    "kinds",
    "looks_like_markup",
    "spell",
    "token_content",
    "vocabulary_family",
]


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the other 68 for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def kinds(part: Any) -> set[str]:
    """The `type` names that occur anywhere in a part of tokenizer.json."""
    if isinstance(part, list):
        return set().union(*map(kinds, part))
    if not isinstance(part, Mapping):
        return set()
    return {str(part.get("type"))}.union(*map(kinds, part.values()))


def vocabulary_family(spec: Mapping[str, Any]) -> str:
    """How tokens spell bytes: "bytes" (byte-level BPE), "sentencepiece" (▁ and <0x41>) or "plain"."""
    found = kinds(spec.get("decoder")) | kinds(spec.get("pre_tokenizer"))
    if "ByteLevel" in found:
        return "bytes"
    pieces = found & {"ByteFallback", "Metaspace"} or (spec.get("model") or {}).get("byte_fallback")
    return "sentencepiece" if pieces else "plain"


def spell(piece: str, family: str, alphabet: Mapping[str, int]) -> bytes:
    """The bytes that an ordinary token of the vocabulary stands for, perhaps half a character."""
    if family == "bytes" and all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    if family == "sentencepiece":
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()
    return piece.encode()


def alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the leftmost longest of `texts`; None when there are none."""
    ordered = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def looks_like_markup(text: str) -> bool:
    """Whether an added token that is not flagged special still carries structure: <think>, [INST], <|tool|>."""
    return len(text) > 2 and text[0] in "<[" and text[-1] in ">]"


SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def token_content(entry: Any) -> str | None:
    """A special token's text in tokenizer_config.json, where it is a string or an object with `content`."""
    text = entry.get("content") if isinstance(entry, Mapping) else entry
    return text if isinstance(text, str) else None


class Tokenizer:
    """Text ↔ token ids of one model, and its chat template. Safe to use from several threads.

    A *control token* is an added token flagged `special` (<|im_end|>, <s>). Only a chat template, or a caller that says
    `parse_special=True`, can produce one from text.
    """

    def __init__(self, raw: tokenizers.Tokenizer, settings: Mapping[str, Any], templates: Mapping[str, str]) -> None:
        self._raw = raw
        spec = json.loads(raw.to_str())
        self._family = vocabulary_family(spec)
        self._strips_blank = bool(kinds(spec.get("decoder")) & {"Strip", "Metaspace"})
        added = raw.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}
        special = [self._added[number] for number in self._special]
        markup = [
            text for number, text in self._added.items() if number not in self._special and looks_like_markup(text)
        ]
        self._special_pattern = alternatives(special)
        self._control_pattern = alternatives([*special, *markup])
        self._bytes: dict[int, bytes] = {}
        self._alphabet = byte_alphabet()
        names = {name: token_content(settings.get(name)) for name in SPECIAL_NAMES}
        self._named = {name: text for name, text in names.items() if text}
        self.vocab_size = max(raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self._before, self._after = self._affixes()
        keep = alternatives(markup)
        self._templates = {name: ChatTemplate(source, self._named, keep) for name, source in templates.items()}

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and what lies beside it; ModelError when there is none or it cannot be read."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json: save the model's fast tokenizer there "
                "(transformers: AutoTokenizer.from_pretrained(name).save_pretrained(folder))."
            )
        try:
            raw = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"{path} is not a tokenizer that can be read ({str(error)[:200]}): fetch it again."
            ) from error
        raw.no_truncation()
        raw.no_padding()
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                settings |= read_json(folder / name)
        templates = read_templates(folder, settings)
        with damaged(path):
            return cls(raw, settings, templates)

    def _named_id(self, name: str) -> int | None:
        return self._raw.token_to_id(self._named[name]) if name in self._named else None

    def _affixes(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts around every text (BOS and, rarely, EOS)."""
        bare = self._raw.encode("a", add_special_tokens=False).ids
        full = self._raw.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    def encode(self, text: str, add_special_tokens: bool = True, *, parse_special: bool = False) -> list[int]:
        """Text to ids. A control token spelled out in `text` stays text unless `parse_special`.

        `add_special_tokens` puts what the model expects around a text (BOS, say), once: a text that begins with the
        parsed BOS gets no second one.
        """
        text = LONE_SURROGATES.sub("\ufffd", text)
        ids = self._encode(text) if parse_special else self._encode_pieces(mark(text), self._special_pattern)
        if not add_special_tokens:
            return ids
        before = [] if self._before and ids[: len(self._before)] == self._before else self._before
        return [*before, *ids, *self._after]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._raw.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_pieces(self, marked: str, control: re.Pattern[str] | None) -> list[int]:
        """Ids of a marked text: tokens of `control` only where no character of theirs is marked."""
        text = unmark(marked)
        if control is None:
            return self._encode(text)
        cuts, cursor = [0], 0
        while match := control.search(text, cursor):
            forged = str.__getitem__(marked, slice(*match.span())) != match.group()
            # Cut behind the first character of a forged token: neither half spells it any more.
            cursor = match.start() + 1 if forged else match.end()
            if forged:
                cuts.append(cursor)
        ids = self._encode(text[: cuts[1]]) if len(cuts) > 1 else self._encode(text)
        for start, end in zip(cuts[1:], [*cuts[2:], len(text)], strict=True) if len(cuts) > 1 else ():
            ids += self._encode_tail(text[start:end])
        return ids

    def _encode_tail(self, text: str) -> list[int]:
        """Ids of text that continues other text: no blank is put in front of it, as SentencePiece does at a start."""
        if self._family == "sentencepiece":
            anchor = self._encode("\n")
            ids = self._encode("\n" + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self._encode(text)

    def is_special(self, token_id: int) -> bool:
        """Whether this is a control token."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, perhaps half a character; b"" for an id that has no token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        piece = self._added.get(token_id)
        if piece is not None:  # Gemma adds runs of blanks, spelled as SentencePiece spells blanks
            plain = self._family != "sentencepiece" or token_id in self._special
            return (piece if plain else piece.replace("▁", " ")).encode()
        piece = self._raw.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if piece is None:
            return b""
        return spell(piece, self._family, self._alphabet)

    def token_text(self, token_id: int) -> str:
        """The token for display: U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True, *, continuation: bool = False) -> str:
        """Ids to text, U+FFFD for bytes that are no UTF-8.

        SentencePiece models write a blank before the first word of a text; it is dropped unless the ids are a
        `continuation` of earlier text.
        """
        shown = [i for i in ids if not (skip_special_tokens and i in self._special)]
        text = b"".join(map(self.token_bytes, shown)).decode(errors="replace")
        return text.removeprefix(" ") if self._strips_blank and not continuation else text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._templates)

    def chat_template(self, *, tools: bool = False) -> ChatTemplate:
        """The template for a conversation with or without tools; ChatError when the model has none."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()), None)
        if template is None:
            raise ChatError("this model has no chat template: send a plain prompt to the completions endpoint instead.")
        return template

    def _render(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> Marked:
        return self.chat_template(tools=bool(options.get("tools"))).render(messages, **options)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt that the model's chat template makes of the messages, to look at; ChatError when it refuses."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        return unmark(self._render(messages, {**template_kwargs, **options, "tools": tools}))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """The same prompt as ids. Control tokens come from the template alone, whatever the messages spell."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        marked = self._render(messages, {**template_kwargs, **options, "tools": tools})
        return self._encode_pieces(marked, self._control_pattern)
