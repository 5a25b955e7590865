"""The paper's experiments: what is trained on what, what came of it, what the paper says."""
