"""Tokens per second of generation beside transformers on the same GPU and weights, in one command.

    python benchmarks/gpu/generate.py --requests 64 --prompt 512 --answer 512

Prompts and answers have mixed lengths, uniform from half to one and a half times the mean. Systems: this package's
`Generator`, transformers' batched `generate` (padded, runs until the longest answer is done) and its continuous
batching. The bound is the time in which the device's memory could deliver the weights and every row's keys and values
once per token. Greedy, no stop token; the greedy tokens of the systems are compared as far as both are exact.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from bessemer.model.families.folder import hf_tensors
from bessemer.model.families.registry import family_named
from bessemer.model.generate import Generator, Request, Sampling
from bessemer.model.transformer import build_model

SIZES = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 8192, "vocab_size": 128256, "head_dim": 64, "tie_word_embeddings": True},
    "135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152, "head_dim": 64, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "vocab_size": 512, "head_dim": 16, "tie_word_embeddings": True},
}  # fmt: skip


def workload(options: argparse.Namespace, vocab: int) -> list[tuple[list[int], int]]:
    draw = random.Random(0)

    def around(mean: int) -> int:
        return draw.randint(mean // 2, mean + mean // 2)

    return [
        ([draw.randrange(vocab) for _ in range(around(options.prompt))], around(options.answer))
        for _ in range(options.requests)
    ]


def timed(run: Any, device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def ours(model: Any, work: list[tuple[list[int], int]], slots: int, compiled: bool, profiled: bool) -> Any:
    longest = max(len(prompt) + answer for prompt, answer in work)
    generator = Generator(model, slots=slots, max_length=longest, compiled=compiled)
    # Graphs of all sizes and a prompt of the usual length before the clock, in caches of the full size: a server does
    # this once.
    start = time.perf_counter()
    generator.runner.batch.allocate(longest + 32)
    generator.run([Request(work[0][0][: 9 + i], 2 + i, Sampling(temperature=0)) for i in range(slots)])
    generator.run([Request(work[0][0], 2, Sampling(temperature=0))])
    generator.contents.clear()
    print(f"warm-up {time.perf_counter() - start:.1f} s", flush=True)
    if profiled:
        profile(generator, slots)
        generator.contents.clear()

    def run() -> list[list[int]]:
        requests = [Request(prompt, answer, Sampling(temperature=0)) for prompt, answer in work]
        return [done.tokens for (done,) in generator.run(requests)]

    return run


def batched(model: Any, work: list[tuple[list[int], int]]) -> Any:
    longest, most = max(len(prompt) for prompt, _ in work), max(answer for _, answer in work)
    device = next(model.parameters()).device
    ids = torch.zeros(len(work), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (prompt, _) in enumerate(work):
        ids[i, longest - len(prompt) :], mask[i, longest - len(prompt) :] = torch.tensor(prompt), 1

    def run() -> list[list[int]]:
        out = model.generate(
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=most, min_new_tokens=most, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return [row[longest : longest + answer].tolist() for row, (_, answer) in zip(out, work, strict=True)]

    return run


def continuous(model: Any, work: list[tuple[list[int], int]]) -> Any:
    import atexit

    from transformers import ContinuousBatchingConfig, GenerationConfig

    positions = sum(len(prompt) + answer for prompt, answer in work)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=max(a for _, a in work), do_sample=False, eos_token_id=-1),
        # Its cache fills the card by default, and its attention without flash-attn reads all of it.
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=positions // 256 + 2 * len(work)),
    )
    manager.start()
    atexit.register(manager.stop, block=False)

    def run(work: list[tuple[list[int], int]] = work) -> list[list[int]]:
        ids = [manager.add_request(prompt, max_new_tokens=answer) for prompt, answer in work]
        done: dict[Any, list[int]] = {}
        while len(done) < len(work):
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching has stopped")
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
        return [done[i] for i in ids]

    run([(prompt, 8) for prompt, _ in work])  # starts its thread, allocates its cache
    return run


def profile(generator: Generator, rows: int) -> None:
    """Prints where the device's time goes in 20 decoding steps."""
    for i in range(rows):
        generator.submit(Request([1 + i] * 512, 64, Sampling(temperature=0)))
    for _ in range(8):
        generator.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        start = time.perf_counter()
        for _ in range(20):
            generator.step()
        torch.cuda.synchronize()
        print(f"{rows} rows: {(time.perf_counter() - start) / 20 * 1e3:.3f} ms a step")
    events = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 20
    print(f"device busy {total / 1e3:.3f} ms a step, {sum(e.count for e in events) / 20:.0f} kernels")
    for event in events[:14]:
        print(f"{event.self_device_time_total / 20:8.1f} us {event.count / 20:6.1f} x {event.key[:90]}")
    while generator.step():
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", choices=SIZES)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument(
        "--systems", nargs="+", default=["bessemer", "compiled", "one", "one-compiled", "batched", "continuous"]
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bandwidth", type=float, default=4.2e12, help="bytes per second that the device can read")
    parser.add_argument("--profile", action="store_true", help="print the kernels of decoding steps")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    import transformers

    config = transformers.LlamaConfig(
        **SIZES[options.model], max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0
    )
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    family = family_named("llama")
    shape = family.shape(config.to_dict())
    model = build_model(shape, options.device, 0).to(dtype).eval()
    work = workload(options, config.vocab_size)
    useful = sum(answer for _, answer in work)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    key_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * torch.finfo(dtype).bits // 8
    read = sum(key_bytes * (len(prompt) + i) for prompt, answer in work for i in range(answer))
    steps = max(answer for _, answer in work)
    bound = useful / ((steps * weights + read) / options.bandwidth)
    results: dict[str, Any] = {"bound_tokens_per_s": round(bound)}
    outputs: dict[str, list[list[int]]] = {}
    peer = None
    for system in options.systems:
        if system in ("batched", "continuous") and peer is None:
            with torch.device(options.device):
                peer = transformers.LlamaForCausalLM(config).to(dtype).eval()
            peer.load_state_dict(dict(hf_tensors(model.state_dict().__getitem__, shape, family)), strict=False)
            peer.tie_weights()
        try:
            if system in ("bessemer", "compiled"):
                run = ours(model, work, options.requests, system == "compiled", options.profile)
            elif system in ("one", "one-compiled"):
                run = ours(model, [(work[0][0][:512], options.answer)], 1, system == "one-compiled", options.profile)
            else:
                run = {"batched": batched, "continuous": continuous}[system](peer, work)
            if system == "batched":
                batched(peer, [(prompt[:64], 8) for prompt, _ in work[:4]])()
            seconds, tokens = timed(run, options.device)
        except Exception as error:  # a peer that fails is a result
            results[system] = {"error": f"{type(error).__name__}: {error}"[:400]}
            print(system, results[system], flush=True)
            continue
        single = system.startswith("one")
        count = options.answer if single else useful
        outputs[system] = tokens
        entry: dict[str, Any] = {"seconds": round(seconds, 3), "tokens_per_s": round(count / seconds)}
        if single:
            alone = options.bandwidth / (weights + key_bytes * 768)
            entry["share_of_bound"] = round(count / seconds / alone, 3)
        else:
            entry["share_of_bound"] = round(count / seconds / bound, 3)
        if options.device == "cuda":
            entry["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if system in ("batched", "continuous") and "bessemer" in outputs:
            pairs = list(zip(outputs["bessemer"], tokens, strict=True))
            same = [next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), len(x)) for x, y in pairs]
            entry["equal_tokens_before_first_difference"] = round(sum(same) / len(same), 1)
            best = max(results[name]["tokens_per_s"] for name in ("bessemer", "compiled") if name in outputs)
            entry["bessemer_is_faster"] = round(best / entry["tokens_per_s"], 2)
        results[system] = entry
        print(system, entry, flush=True)
    record = {
        "date": str(date.today()), "commit": options.commit, "torch": torch.__version__,
        "transformers": transformers.__version__, "model": options.model, "requests": options.requests,
        "prompt": options.prompt, "answer": options.answer, "results": results,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
