"""The sizes of a model by the first bytes of its GGUF file, without torch and without its weights.

The file says its settings as pairs of a key and a typed value. `read_header` ends at the
vocabulary, of which it takes only the number of tokens; `read_setting` finds a setting behind it.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
STRING = 8
ARRAY = 9
# Types of values by their numbers, as `struct` names them.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
TOKENS = "tokenizer.ggml.tokens"
ADD_BOS = "tokenizer.ggml.add_bos_token"
LARGEST = 2**31  # sizes of a model are below it
MOST_KEYS = 1000  # a file with more is broken
TIED_UP_TO = 3072  # width; the header does not say it, and wider models have a head of their own
LONGEST = 2**20  # bytes of a string, and items of an array before the vocabulary


def read_header(file: Path) -> dict[str, Any]:
    """Settings up to the vocabulary; `tokenizer.ggml.tokens` is the number of tokens. ValueError
    if the file is not what it should be."""
    with _opened(file) as stream:
        return _read_pairs(stream)


def read_setting(file: Path, wanted: str) -> Any:
    """The value of one setting anywhere in the header, or None. ValueError as above."""
    with _opened(file) as stream:
        for _ in range(_count_pairs(stream)):
            key = _read_string(stream)
            (kind,) = _unpack(stream, "I")
            if key == wanted:
                return _read_value(stream, kind)

            _skip_value(stream, kind)

    return None


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with file.open("rb") as stream:
            yield stream
    except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
        raise ValueError(f"{file}: cannot read this GGUF file: {error}") from error


def model_config(file: Path) -> dict[str, Any]:
    """The sizes under the names of Transformers' config.json."""
    values = read_header(file)
    kind = values.get("general.architecture", "")
    names = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
    }
    config: dict[str, Any] = {"model_type": kind}
    sizes = {name: values.get(f"{kind}.{key}") for name, key in names.items()}
    sizes["vocab_size"] = values.get(TOKENS)

    for name, value in sizes.items():
        if type(value) is int and 0 < value < LARGEST:  # some models have one for each layer
            config[name] = value

    config["tie_word_embeddings"] = config.get("hidden_size", 0) <= TIED_UP_TO
    return config


def _count_pairs(stream: BinaryIO) -> int:
    if stream.read(4) != MAGIC:
        raise KeyError("it does not begin with GGUF")

    _version, _num_tensors, num_keys = _unpack(stream, "IQQ")
    return min(num_keys, MOST_KEYS)


def _read_pairs(stream: BinaryIO) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(_count_pairs(stream)):
        key = _read_string(stream)
        (kind,) = _unpack(stream, "I")
        if key == TOKENS:
            _, length = _unpack(stream, "IQ")
            values[key] = length
            break

        values[key] = _read_value(stream, kind)

    return values


def _read_value(stream: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _read_string(stream)

    if kind == ARRAY:
        inner, length = _unpack(stream, "IQ")
        if inner == ARRAY or length > LONGEST:
            raise KeyError("an array is too long")

        return [_read_value(stream, inner) for _ in range(length)]

    (value,) = _unpack(stream, SCALARS[kind])
    return value


def _skip_value(stream: BinaryIO, kind: int) -> None:
    if kind == ARRAY:
        inner, length = _unpack(stream, "IQ")
    else:
        inner = kind
        length = 1

    if inner == STRING:
        for _ in range(length):  # a broken file ends before a broken length
            (size,) = _unpack(stream, "Q")
            stream.seek(size, SEEK_CUR)
    else:
        stream.seek(length * struct.calcsize(SCALARS[inner]), SEEK_CUR)


def _read_string(stream: BinaryIO) -> str:
    (length,) = _unpack(stream, "Q")
    if length > LONGEST:
        raise KeyError("a text is too long")

    data = stream.read(length)
    if len(data) < length:
        raise KeyError("it ends early")

    return data.decode()


def _unpack(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    form = f"<{form}"
    return struct.unpack(form, stream.read(struct.calcsize(form)))
