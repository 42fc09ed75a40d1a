"""Parts that only CPU engines have: platform, layers, decoder, attention, sampling."""
