"""What CPU engines have of their own: platform, layers, decoder, attention, sampling."""
