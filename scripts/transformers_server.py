"""The continuous batching of `transformers` behind the few lines of HTTP that the benchmark speaks.

    python scripts/transformers_server.py MODEL_FOLDER PORT

One endpoint streams greedy completions of token-id prompts, one lists the model, one says that it is ready. It is made
of the standard library, so that what is measured is the engine and not a web framework.
"""

import asyncio
import json
import sys
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

MAX_SEQUENCES, PAGE, PAGES, BATCH_TOKENS = 32, 256, 160, 512


def load(folder: str) -> Any:
    """A started manager for the model in bfloat16, with a pool of 160 pages of 256 tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=PAGES, max_batch_tokens=BATCH_TOKENS, max_requests_per_batch=MAX_SEQUENCES
    )
    greedy: Any = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16)  # type: ignore[no-untyped-call]
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    manager.start()
    return manager


async def stream(manager: Any, body: dict[str, Any], writer: asyncio.StreamWriter, name: str) -> None:
    """One answer: an event for each token, then the usage."""
    news: asyncio.Queue[Any] = asyncio.Queue()
    prompt, sent = body["prompt"], 0
    manager.register_result_handler(name, news.put_nowait)
    manager.add_request(prompt, request_id=name, max_new_tokens=body["max_tokens"], streaming=True, eos_token_id=-1)
    while True:
        output = await news.get()
        if output.error:
            raise RuntimeError(output.error)
        ended = output.is_finished()
        fresh = output.generated_tokens[sent:]
        sent += len(fresh)
        if fresh or ended:
            choice = {"index": 0, "text": "x" * len(fresh), "finish_reason": "length" if ended else None}
            writer.write(event({"choices": [choice | {"token_ids": fresh}]}))
            await writer.drain()
        if ended:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": sent}
            writer.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
            return


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def answer(manager: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
    """Read one request from the connection, answer it, and close."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split(" ", 2)[1]
    lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length:")]
    known = {
        "/health": {"status": "ready"},
        "/version": {"version": transformers.__version__},
        "/v1/models": {"data": [{"id": "transformers"}]},
    }
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    try:
        if path in known:
            writer.write(json.dumps(known[path]).encode())
        else:
            await stream(manager, json.loads(await reader.readexactly(int(lengths[0]))), writer, name)
        await writer.drain()
    finally:
        writer.close()


async def serve(manager: Any, port: int) -> None:
    """Answer connections until the process is ended."""
    number = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        await answer(manager, reader, writer, f"request-{number}")

    async with await asyncio.start_server(connected, "127.0.0.1", port, backlog=128) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(load(sys.argv[1]), int(sys.argv[2])))
