"""The streamed model: a transformers model whose blocks are called one by one, with parameters that come and go."""
