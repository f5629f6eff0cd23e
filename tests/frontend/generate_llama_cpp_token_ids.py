"""Writes data/llama_cpp_token_ids.json: what llama.cpp's own tokenizer makes of many kinds of text.

usage (needs llama-cpp-python, 0.3.36 last time):
    python generate_llama_cpp_token_ids.py smollm2-135m=SMOLLM2.gguf gemma3-270m=GEMMA3.gguf
"""

import json
import random
import sys
from pathlib import Path

OUT = Path(__file__).parent / "data" / "llama_cpp_token_ids.json"

PROSE = """The quick brown fox jumps over the lazy dog.
I can't believe it's not butter; they've said we'll see, you're right, he'd know, I'M SURE.
don’t use ‘smart quotes’ — or “these” … ok?
In 1984, 3.14159 of 1,000,000 people (i.e. 0.000314%) paid $12.50 on 2024-02-29 at 13:37:59.
e = mc^2 + 0x1F4A9 - 1e-10 * 42!
ALL CAPS, CamelCase, snake_case, kebab-case, dot.case, SCREAMING_SNAKE_CASE
user@example.com https://example.com/a/b?c=d&e=%20f#g ftp://1.2.3.4:8080
Donaudampfschifffahrtsgesellschaftskapitän Straße Übermut naïve café façade Ångström
Être ou ne pas être, telle est la question : « voilà » ! ¿Qué tal, señor? ¡Muy bien!
Привет, как дела? Всё хорошо. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया
สวัสดีชาวโลก xin chào thế giới İstanbul ıIiİ ǅ ﬁne ﬀ
你好，世界！今天天气很好。東京タワーは高い。こんにちは世界 안녕하세요 세계
𠮷野家 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛 ½ ² ³ ⅷ ٣٤٥ ०१२ 一二三
🙂 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 ❤️ ☕️ 🤷‍♀️
éclair é n̈ Z͑ͫ̓a̴l͓g̢o
if (x <= 3 && y != null) { return arr[i++] ?? foo::bar<T>(&*p); } // comment
def f(x: int = 0) -> str: return f"{x!r:>10}" # 100% 
<div class="a b">&nbsp;<b>bold</b><table><tr><td>1</td></tr></table></div>
SELECT * FROM t WHERE a='b' AND c LIKE '%d_';
\\alpha_{i}^{2} \\frac{1}{2} $x\\in\\mathbb{R}$
{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9\\n"}}
| a | b |
|---|---|
- item
1. first
## Heading
```python
>>> !!! ??? ... ;;; ''' \"\"\" ### --- *** ___ === ~~~ ^^^ ``` 
'S 'T 're 'VE 'LL 'd 'x s' t's
1a2b3c a1b2c3 v1.2.3-rc4 10th 2nd 3x3 x86_64 H2O CO₂
<|im_start|>user
<|im_start|>system
You are a helpful assistant.<|im_end|>
<|endoftext|> <|im_end|><|im_end|> a<|im_start|>b
<bos>text<eos> <unk> <pad> <unused5> <start_of_turn>user
<0x41> <0x0A> <0xE4>
<s> </s> [INST] hi [/INST] <<SYS>>
▁under▁score ▁ Ġ Ċ ĉ âĢĻ
"""

WHITESPACE = [
    " ", "  ", "   ", "\n", "\n\n", "\n\n\n\n\n", "\t", "\t\t\t", "\r\n", "\r\n\r\n", " \n", "\n ", " \t \n \t ",
    "a  b", "a   b    c", " a", "  a", "a ", "a  ", "a\n", "a\n\nb", "a \n b", "a\n  b\n    c\n\td", "a\r\nb\r\n",
    "\u00a0", "a\u00a0b", "\u3000全角\u3000", "a\u200bb", "\u2028x\u2029", "x\u0085y", "\x0b\x0c", "\ufeffbom",
    "  1", "1  2", "12 345", "   !", "!  ?", " 'll", "  's", "\n's", " " * 33, "\n" * 33, "a" + " " * 20 + "b",
    "\x00", "a\x00b", "\x01\x02\x7f", "\ud7ff\ue000\U0010ffff",
]  # fmt: skip

DIGITS = [
    "0",
    "12",
    "123",
    "1234",
    "12345678901234567890",
    "1 2 3",
    "007",
    "3.0",
    "1,234.5",
    "٣٤٥٦",
    "１２３",
    "Ⅻ",
    "1٣2",
]

BLOCKS = [
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x370, 0x52F),
    (0x900, 0x97F),
    (0x2000, 0x27BF),
    (0x3040, 0x30FF),
]
BLOCKS += [(0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF)]


def random_texts(count: int) -> list[str]:
    """Words from random blocks of Unicode, with random white space between."""
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        words = []
        for _ in range(rng.randint(1, 8)):
            low, high = rng.choice(BLOCKS)
            words.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6))))
            words.append(rng.choice(["", " ", " ", "  ", "\n", "\t", "'", "."]))
        texts.append("".join(words))
    return texts


def texts() -> list[str]:
    lines = PROSE.splitlines()
    return [*lines, PROSE, *WHITESPACE, *DIGITS, *random_texts(110)]


def main() -> None:
    from llama_cpp import Llama

    found = {}
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        model = Llama(path, vocab_only=True, verbose=False)
        found[name] = [
            [text, model.tokenize(text.encode(), add_bos=False, special=True)] for text in texts()
        ]
    OUT.parent.mkdir(exist_ok=True)
    lines = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
        for name, rows in found.items()
    ]
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
