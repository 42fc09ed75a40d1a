"""What talks to Ray: the only modules of voltserve that import it, each started as a process or by Ray itself."""
