"""A page of mixed text (prose, code, numbers, scripts, signs), by which two tokenizers or runtimes are compared."""

from __future__ import annotations

PAGE = """\
Once upon a time there was a little girl named Lily. She loved to play outside in the park, and she'd say: "Don't go!"
The city's population grew from 1,024 in 1890 to 65,536 in 1931 (an increase of 6300%); it's 3.14159 km² in area.

def mean(values: list[float]) -> float:
    \"\"\"The mean; 0.0 for none.\"\"\"
\treturn sum(values) / len(values) if values else 0.0  # O(n)

    for (int i = 0; i < n; ++i) { total += a[i] * 0x1F; }   // ~ && || <= >= != :: -> ...
https://example.org/a/b?c=d&e=%20#top   user@example.org   C:\\Users\\name   $HOME/.config
snake_case camelCase HTTPServer

Grüße aus München! Où est la bibliothèque? ¿Dónde está el niño? Čeština, polski żółw, Türkçe ışık, Ελληνικά
Привет, мир.
你好，世界。今日は良い天気です。안녕하세요 세계. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया. สวัสดีชาวโลก
Emoji: 🙂🚀 👍🏽 ❤️ €£¥ ½ × ÷ √ ∞ ≈ – — “quoted” ‘single’ … • § ©

  Two leading spaces, trailing spaces   \n\n\n\tTabs\tand\r\nline ends.  I'M, We'll, THEY'VE, they've;
12345678901234567890 1 22 333 4444
"""
