"""Bidirectional encoders of the BERT kind: whole texts in, hidden states out, nothing kept between steps."""
