"""How much a quantized model differs from its 16-bit source: text, questions, long outputs; a directory or a server."""
