"""Tokens that leave: real models on unseen text, and which combinations each tool gets right."""
