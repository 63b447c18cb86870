"""A server on this machine that generates with a model and adapters that it loads on request: a stand-in for vLLM.

    python examples/generation_server.py CHECKPOINT

It holds the whole model in memory, in transformers, and answers JSON on loopback: ``/load`` with the folder of an
adapter, ``/generate`` with prompts. A real server takes the same two requests.
"""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from peft import PeftModel, load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM


class GenerationServer:
    """A server in a separate process, as its client sees it.

    Args:
        checkpoint: folder of the model.
    """

    def __init__(self, checkpoint: Path):
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(checkpoint)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def load(self, adapters: Path) -> None:
        """Let the server generate with these adapters from now on."""
        self._ask("load", {"adapters": str(adapters.absolute())})

    def generate(
        self, prompts: list[torch.Tensor], most: int, seed: int | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tokens of an answer to each prompt, and their log-probabilities; prompts are equally long.

        Without a seed, answers are of the likeliest tokens.
        """
        answer = self._ask(
            "generate", {"prompts": [row.tolist() for row in prompts], "most": most, "seed": seed}
        )
        return [torch.tensor(row) for row in answer["tokens"]], [
            torch.tensor(row) for row in answer["log_probs"]
        ]

    def _ask(self, what: str, content: dict[str, Any]) -> Any:
        request = Request(f"http://127.0.0.1:{self._port}/{what}", json.dumps(content).encode())
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def __enter__(self) -> "GenerationServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


class _Model:
    """The model in memory."""

    def __init__(self, checkpoint: str):
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def load(self, adapters: str) -> dict[str, Any]:
        """Load adapters, in place of earlier ones."""
        if isinstance(self._model, PeftModel):
            set_peft_model_state_dict(self._model, load_peft_weights(adapters))
        else:
            self._model = PeftModel.from_pretrained(self._model, adapters).eval()
        return {}

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], most: int, seed: int | None) -> dict[str, Any]:
        """Draw an answer to each prompt, or without a seed take the likeliest tokens."""
        torch.manual_seed(seed or 0)
        ids, end = torch.tensor(prompts), self._model.config.eos_token_id
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=seed is not None,
            top_k=0,
            pad_token_id=end,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = output.sequences[:, ids.shape[1] :]
        log_probs = torch.stack(output.logits, 1).log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)
        lengths = [(row.index(end) + 1 if end in row else len(row)) for row in new.tolist()]
        return {
            "tokens": [row[:length] for row, length in zip(new.tolist(), lengths, strict=True)],
            "log_probs": [row[:length] for row, length in zip(log_probs.tolist(), lengths, strict=True)],
        }


def _end_with_client() -> None:
    """End this process when the client's end of standard input is closed, however that comes about."""
    sys.stdin.read()
    os._exit(0)


def serve(checkpoint: str) -> None:
    """Answer until this process is ended; the port is the first line on standard output."""
    model = _Model(checkpoint)
    threading.Thread(target=_end_with_client, daemon=True).start()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(
                {"/load": model.load, "/generate": model.generate}[self.path](**content)
            ).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1])
