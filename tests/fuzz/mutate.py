"""Valid input put wrong. Everything is drawn from one `random.Random`, so that a seed gives it again."""

from __future__ import annotations

import json
import random
from typing import Any

RAW = (
    "NaN",
    "-Infinity",
    "1e999",
    "-1e400",
    "1" + "0" * 40,
    "9" * 5000,
    "-1",
    "0",
    "1.5",
    "0.0000000001",
    "true",
    "null",
    "[" * 40 + "]" * 40,
    "[" * 100_000,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    '"\\ud800"',
    '"\\u0000"',
    '"' + "x" * 20_000 + '"',
    '"../../../etc/passwd"',
    '"/etc/passwd"',
    '"line\\nbreak\\tand \\u001b[31m colour"',
    '"[bold]markup[/nothing]"',
    "{}",
    "[]",
    '""',
    "[null]",
    '{"__class__": "os.system", "__reduce__": ["id"]}',
)
"""JSON values nobody expects, as they are written."""
LINES = ("", "\t", "x" * 10_000, "\x00", "�", "a\tb\tc", "NaN", "1e999", "'", '"', "=", "[[[", "\r", "é" * 50)
NUMBERS = (
    0,
    1,
    2,
    3,
    -1,
    -(2**31),
    2**31,
    2**40,
    2**63,
    2**64,
    10**30,
    65_536,
    65_537,
    10_000_000,
    0.5,
    1e-300,
)


def hostile_json(rng: random.Random, base: Any) -> bytes:
    """A JSON text with some values, keys or bytes of `base` put wrong."""
    raws: list[str] = []

    def raw(text: str) -> str:
        raws.append(text)
        return f"@{len(raws) - 1}@"

    value = json.loads(json.dumps(base))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = _edited(rng, value, raw)
    text = json.dumps(value)
    for place, replacement in enumerate(raws):
        text = text.replace(f'"@{place}@"', replacement)
    data = text.encode("utf-8", errors="surrogatepass")
    return hostile_bytes(rng, data) if rng.random() < 0.15 else data


def _edited(rng: random.Random, value: Any, raw: Any) -> Any:
    """`value` with one node at a random depth changed."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        roll = rng.random()
        if roll < 0.12:
            return {k: v for k, v in value.items() if k != key}
        if roll < 0.17:
            return {
                (k if k != key else rng.choice(("", "x", k.upper(), "model_type"))): v
                for k, v in value.items()
            }
        return {**value, key: _edited(rng, value[key], raw)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        roll = rng.random()
        if roll < 0.1:
            return value[:place] + value[place + 1 :]
        if roll < 0.2:
            return value[: place + 1] + value[place:]
        return [*value[:place], _edited(rng, value[place], raw), *value[place + 1 :]]
    if isinstance(value, int | float) and rng.random() < 0.5:
        return rng.choice(NUMBERS)
    if isinstance(value, str) and rng.random() < 0.3:
        return rng.choice((value * 2, value.upper(), value[:-1], value + " ", value + "\n", "relu", "bert"))
    return raw(rng.choice(RAW))


def hostile_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes cut off, flipped, doubled, replaced or put in."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(data) + 1) if rng.random() < 0.7 else min(len(data), rng.randrange(64))
        roll = rng.randrange(6)
        if roll == 0:
            data = data[:place]
        elif roll == 1 and place < len(data):
            data = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        elif roll == 2:
            data = data[:place] + rng.randbytes(rng.choice((1, 2, 8))) + data[place:]
        elif roll == 3:
            data = data[:place] + data[place : place + 40] * 2 + data[place + 40 :]
        elif roll == 4:
            patch = rng.choice(
                (b"\xff\xfe", b"\x00" * 8, b"\xff" * 8, b"\xed\xa0\x80", b"\xef\xbb\xbf", b"PK\x03\x04")
            )
            data = data[:place] + patch + data[place + len(patch) :]
        else:
            data = data[place:]
    return data


def hostile_text(rng: random.Random, text: str) -> bytes:
    """Lines of a text dropped, doubled, replaced, or their bytes put wrong."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(lines))
        roll = rng.randrange(4)
        if roll == 0 and len(lines) > 1:
            del lines[place]
        elif roll == 1:
            lines.insert(place, rng.choice(lines))
        elif roll == 2:
            lines[place] = rng.choice(LINES)
        else:
            at = rng.randrange(len(lines[place]) + 1)
            lines[place] = lines[place][:at] + rng.choice(LINES)[:50] + lines[place][at:]
    data = "\n".join(lines).encode()
    return hostile_bytes(rng, data) if rng.random() < 0.25 else data
