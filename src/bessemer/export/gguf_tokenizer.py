"""A tokenizer in GGUF's terms: byte-level BPE, or SentencePiece's BPE.

llama.cpp does not read a split rule from the file but knows some by name (`tokenizer.ggml.pre`); a rule without one is
refused, since a wrong name changes ids silently. The gate compares the ids of texts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bessemer.data.tokenizer.chat import turn_end_ids
from bessemer.data.tokenizer.load import SPACE, SPLITS
from bessemer.data.tokenizer.tokenizer import PromptFormat, Tokenizer
from bessemer.errors import UserError
from bessemer.export.chat_template import TEMPLATES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # llama.cpp's token types
_QWEN2 = SPLITS["llama3"].replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Each was compared on the texts of the tests; llama-bpe also prefers whole words of the vocabulary to merges.
PRE_TOKENIZERS = {
    SPLITS["llama3"]: "llama-bpe",
    SPLITS["gpt2"]: "gpt-2",
    _GPT2: "gpt-2",
    SPLITS["cl100k"]: "dbrx",
    SPLITS["o200k"]: "gpt-4o",
    _QWEN2: "qwen2",
}


@dataclass(frozen=True)
class GgufVocabulary:
    """`kind` is llama.cpp's tokenizer; tokens, types and scores are in the order of the ids."""

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    space_prefix: bool = False

    def write(self, writer: Any, tokenizer: Tokenizer, form: PromptFormat, template: str | None) -> None:
        """All tokenizer keys, on a gguf.GGUFWriter."""
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_prefix)
        if len(form.prefix) > 1 or len(form.suffix) > 1:
            raise UserError(f"GGUF adds one token before a text, this tokenizer {len(form.prefix)}: use --to hf")
        writer.add_bos_token_id(form.prefix[0] if form.prefix else form.start)
        writer.add_eos_token_id(tokenizer.eos_id if tokenizer.eos_id in form.ends else min(form.ends))
        writer.add_add_bos_token(bool(form.prefix))
        writer.add_add_eos_token(bool(form.suffix))
        if template is not None:
            turn_ends = sorted(turn_end_ids(template, tokenizer) - {tokenizer.eos_id})
            if turn_ends:
                writer.add_eot_token_id(turn_ends[0])
            writer.add_chat_template(TEMPLATES.get(template, template))


def vocabulary(tokenizer: Tokenizer, size: int) -> GgufVocabulary:
    """The vocabulary, filled up to the rows of the embedding."""
    definition = json.loads(tokenizer.inner.to_str())
    model = definition["model"]
    if model["type"] != "BPE":
        raise UserError(f"a tokenizer of kind {model['type']} has no exact form in GGUF: use --to hf")
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [UNUSED] * size
    for token, number in model["vocab"].items():
        if number < size:
            tokens[number], types[number] = token, NORMAL
    for added in definition["added_tokens"]:
        if added["id"] < size:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    if model.get("byte_fallback"):
        return _sentencepiece(definition, tokens, types, merges)
    pre = _pre_tokenizer(definition)
    return GgufVocabulary("gpt2", pre, tokens, types, [" ".join(pair) for pair in merges], [])


def _sentencepiece(
    definition: dict[str, Any], tokens: list[str], types: list[int], merges: list[tuple[str, ...]]
) -> GgufVocabulary:
    """SentencePiece merges the pair whose result has the best score: here the earlier merge."""
    if not merges:
        raise UserError("a tokenizer of single characters has no exact form in GGUF: use --to hf")
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x"):
            types[number] = BYTE
        elif token == definition["model"].get("unk_token"):
            types[number] = UNKNOWN
    normalizer = json.dumps([definition["normalizer"], definition["pre_tokenizer"]], ensure_ascii=False)
    prefixed = f'"prepend": "{SPACE}"' in normalizer or '"prepend_scheme": "first"' in normalizer
    prefixed = prefixed or '"prepend_scheme": "always"' in normalizer or r"\\A" in normalizer
    return GgufVocabulary("llama", "default", tokens, types, [], scores, prefixed)


def _pre_tokenizer(definition: dict[str, Any]) -> str:
    """llama.cpp's name of the rule by which text is split."""
    normalizer, outer = definition.get("normalizer"), definition.get("pre_tokenizer") or {}
    parts = outer.get("pretokenizers", [outer])
    kinds = [part.get("type") for part in parts]
    last: dict[str, Any] = parts[-1] if parts else {}
    byte_level = kinds[-1:] == ["ByteLevel"] and not last.get("add_prefix_space")
    name = None
    if byte_level and kinds == ["ByteLevel"] and last.get("use_regex", True):
        name = "gpt-2"
    elif byte_level and kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        name = "smollm"
    elif byte_level and kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        name = PRE_TOKENIZERS.get(parts[0]["pattern"].get("Regex"))
    composed = normalizer is not None and normalizer.get("type") == "NFC" and name == "qwen2"
    if name is None or (normalizer is not None and not composed):
        rule = json.dumps(outer if name is None else normalizer, ensure_ascii=False)
        rule = rule if len(rule) < 160 else f"{rule[:160]}..."
        raise UserError(f"llama.cpp has no name that is known here for this tokenizer's rule {rule}: use --to hf")
    return name
