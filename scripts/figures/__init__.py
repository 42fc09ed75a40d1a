"""Tables of figures, made from result files: docs/figures.yaml says which figure stands where."""
