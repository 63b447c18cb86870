"""From examples to tokens: chat templates, which tokens carry loss, and records longer than a row."""
