"""``hal generate CHECKPOINT --prompt TEXT``: streams text to standard output, and nothing else there."""

from __future__ import annotations

import argparse
import json
import sys
import time

from hal.batch import Sampling
from hal.errors import HalError
from hal_models.commands.loading import checkpoint, common, loaded


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("checkpoint", help="a folder, or tiny-dense, tiny-moe")
    parser.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="again for several at once")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (greedy) by default")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="one token that ends the text")
    parser.add_argument("--draft", type=int, default=0, metavar="N", help="draft N tokens a step, 1 to 7 (0: none)")
    parser.add_argument("--report", action="store_true", help="print what was chosen to standard error")
    common(parser)


def run(args: argparse.Namespace) -> int:
    """Generate, streaming a single prompt; several come one after the other, each with its prompt."""
    from hal_models.engine import Engine, Request, pages_of
    from hal_models.text import printable, text_of

    sampling = Sampling(args.temperature, args.top_p, args.top_k, args.seed)
    folder = checkpoint(args.checkpoint)
    model = loaded(folder, args.dtype, args.draft)
    text = text_of(folder, model.cfg.vocab)
    stops = set(model.cfg.stops)
    for stop in args.stop:
        ids = text.encode(_unescaped(stop))
        if len(ids) != 1:
            raise HalError(f"generate: --stop: expected one token, {stop!r} is {len(ids)}")
        stops.add(ids[0])
    requests = [Request(text.encode(p), args.max_tokens, sampling, frozenset(stops)) for p in args.prompt]
    engine = Engine(model, slots=len(requests), pages=sum(pages_of(model, r) for r in requests))
    for request in requests:
        engine.add(request)
    out = sys.stdout if model.runtime.rank == 0 else None
    if args.report:
        print(model.runtime.report(), file=sys.stderr)
    streams = [text.stream() for _ in requests]
    written, finish = [""] * len(requests), [""] * len(requests)
    tokens: list[list[int]] = [[] for _ in requests]
    live = out if len(requests) == 1 and not args.json else None
    start = time.perf_counter()
    for event in engine.run():
        stream = streams[event.request]
        piece = stream.add(event.token) if event.token is not None else stream.end()
        written[event.request] += piece
        if event.token is None:
            finish[event.request] = event.finish
        else:
            tokens[event.request].append(event.token)
        if live:
            live.write(piece)
            live.flush()
    if args.draft and out:
        rate = sum(map(len, tokens)) / (time.perf_counter() - start)
        print(f"acceptance length {engine.acceptance:.2f}, {rate:.1f} tokens/s", file=sys.stderr)
    if out and args.json:
        rows = [
            {"prompt": printable(p), "text": w, "tokens": t, "finish": f}
            for p, w, t, f in zip(args.prompt, written, tokens, finish, strict=True)
        ]
        print(json.dumps({"schema": "hal.generate/1", "completions": rows}), file=out)
    elif live:
        live.write("\n")
    elif out:
        for prompt, more in zip(args.prompt, written, strict=True):
            print(printable(prompt) + more, file=out)
    return 0


def _unescaped(stop: str) -> str:
    """A stop with escapes such as ``\\n`` read; other characters stay what they are."""
    try:
        return stop.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise HalError(f"generate: --stop: {stop!r} has a bad escape: {error.reason}") from None
