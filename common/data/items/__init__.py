"""Data of which a batch item is more than a row of tokens: pairs of answers, labelled answers, texts with classes."""
