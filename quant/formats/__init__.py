"""One module per on-disk format: pure in, pure out. Only these modules know divisors and nibble orders."""
