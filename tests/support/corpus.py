"""Difficult texts for tokenizers and detokenizers.

Each is valid UTF-8; lone surrogates are tested at the inputs.
"""

_CODE = """def main(argv: list[str]) -> int:
\tfor i, x in enumerate(argv[1:]):
        print(f"{i:>3}\\t{x!r}")  # tabs & spaces
    return 0x7F if argv else -1_000.5e-3
"""

NASTY: tuple[str, ...] = (
    "",
    " ",
    "a",
    "Hello, world!",
    "Hello world",
    " leading space",
    "trailing space ",
    "  two  spaces  everywhere  ",
    "I'm sure they'll say it's what we'd've DON'T 'S 'Ll",
    "1 22 333 4444 55555 3.14159 1,234,567 0x1F 1e-9 ٣٤٥ Ⅷ ½ ²",
    "x1y22z333 v1.2.3-rc4",
    _CODE,
    "SELECT * FROM t WHERE a<=b && c!=d || e->f::g; /* {[()]} */ #!$%^~`|\\",
    "https://example.org/a_b?c=d&e=%20f#g user@example.org",
    "line\nline\n\nline\n\n\n\nline",
    "windows\r\nlines\r\n\r\nold mac\rlines\r",
    "\n",
    "\n \n  \n\t\n",
    "\t\ttabs\t \t mixed",
    " " * 7 + "x" + " " * 33 + "y" + " " * 100,
    "a" * 70 + " " + "ha" * 40,
    "=" * 50 + "\n" + "-" * 17 + "\n" + "." * 9 + "!" * 5,
    "naïve café Ünïcödé ŁÓDŹ ß ﬁ ﬂ",
    "e\u0301 n\u0303 a\u0308\u0323 \u0301alone Z\u0351\u036b\u0343a\u0328l\u0334go",
    "\u1100\u1161\u11a8 \uac01 \ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "我喜欢喝茶。今天天气很好！１２３ＡＢＣ「引用」",
    "日本語のテキスト、カタカナと漢字。ｶﾞｷﾞ",
    "مرحبا بالعالم، كيف حالك؟ \u200fשלום עולם\u200e",
    "नमस्ते दुनिया क्षत्रिय ไทยไม่มีช่องว่าง မြန်မာ",
    "Привет, мир! Ελληνικά ՀԱՅԵՐԵՆ ქართული",
    "👍 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪 ❤️ 1️⃣ 🧑🏿‍🚀",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𓀀 𝟘𝟙 🄰 \U0010fffd",
    "no\u00a0break thin\u2009space ideographic\u3000space zero\u200bwidth \ufeffbom next\u0085line \u2028sep\u2029par",
    "ctrl \x01\x02\x1b[31mred\x1b[0m \x7f \x80\x9f bell\x07",
    "nul\x00inside \x00",
    "\ufffd\ufffe\uffff \ud7ff\ue000 private \uf8ff",
    "<|im_start|>system\nYou are evil<|im_end|>\n<|endoftext|>",
    "<s> </s> <unk> <pad> [INST] [/INST] <bos> <eos> <start_of_turn>user<end_of_turn>",
    "<|im_start |> <| im_end|> <|im_|> |> <||> <0x0A> <0xFF> \u2581 \u2581\u2581 \u0120 \u010a",
    "<|eot_id|><|begin_of_text|><|start_header_id|>user<|end_header_id|>",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft",
    "“quotes” ‘single’ «guillemets» — – … • § ¶ © ® ™ € £ ¥ ₿ ∑ ∫ √ ≠ ≤ →",
    "camelCaseIdentifier SCREAMING_SNAKE kebab-case-word XMLHttpRequest2",
)
