"""The command line, the gateway and the supervisor of voltserve; never imports torch or vLLM."""
