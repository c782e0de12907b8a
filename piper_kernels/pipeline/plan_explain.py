"""Why a strategy takes what it takes: each term of memory and time with its formula, as text.

Pure: no torch, no process group. Letters: T tokens of a microbatch, H hidden_size, I width of an
expert, E experts, K top_k, P pipeline ranks, M microbatches.
"""

import textwrap

from piper_kernels.pipeline.layer_time import LayerTime
from piper_kernels.pipeline.rank_memory import RankMemory
from piper_kernels.pipeline.step_time import StepModel, StepTime
from piper_kernels.pipeline.strategy import Strategy

# term -> how it is computed
# a product is max(tiles in whole waves / rate, bytes / bandwidth) + launch
FORMULAS = {
    "attention projections": "products T x in x out, cut over tp",
    "attention": "T s heads (qk + v) / rate(s); back 2.5 x",
    "norms and residuals": "10 passes over T H 2 B, back 12",
    "router": "product T x H x E, 4 fp32 passes over T E",
    "experts gate_up": "L products of T K imbalance / L rows",
    "experts down": "L products of as many rows, I to H",
    "experts moves": "T + 5 T K rows of H 2 B: pack, sort, sum",
    "shared experts": "products T x H x I and T x I x H",
    "dense network": "products T x H x I and T x I x H",
    "tensor parallel": "all-reduces of T H 2 B",
    "exchange": "traffic model; what experts do not hide",
    "head": "product T x H x vocabulary, there and back",
    "loss": "3 passes over T x vocabulary in fp32, back 2",
    "embedding": "2 passes over T H 2 B, there and back",
    "send": "latency + T H 2 B / tp / share of a NIC; delays only the receiver",
    "reduce dense gradients": "all-reduce of 2 B a weight over dp * ep ranks",
    "reduce expert gradients": "all-reduce of 2 B a weight over dp ranks",
    "reduce tied embedding": "all-reduce of 2 B a weight between first and last stage",
    "optimizer": "bytes that an update reads and writes / copy bandwidth",
}


def formula_of(term: str) -> str:
    """How a term is computed; ``X again`` is X, recomputed.

    Example:
        >>> formula_of("router again")
        'again: product T x H x E, 4 fp32 passes over T E'
    """
    if term.endswith(" again"):
        return "again: " + formula_of(term.removesuffix(" again"))
    if term.endswith(" activation"):
        return "passes over T x width x 2 B"
    return FORMULAS[term]


def explain(steps: StepModel, memory: RankMemory, strategy: Strategy) -> str:
    """All terms of one strategy, at most 100 columns wide."""
    step = steps.predict(strategy)
    lines = [
        f"{steps.model.name} on {strategy.world_size} GPUs of {steps.platform.name} (modelled)"
    ]
    lines += [f"strategy: {strategy.name}", f"layers a stage: {_runs(strategy.layers_per_stage)}"]
    lines += ["", *_memory_lines(memory, strategy)]
    for layer in dict.fromkeys(steps.model.layers):
        count = steps.model.layers.count(layer)
        time = steps.layer_time(layer, strategy)
        lines += ["", f"one {layer.kind} layer (of {count}), one microbatch, ms"]
        lines += _layer_lines(time)
    lines += ["", *_step_lines(steps, strategy, step)]
    return "\n".join(line[:100].rstrip() for line in lines)


def _runs(counts: tuple[int, ...]) -> str:
    """Equal neighbours together: ``2, 3 x 14, 1``."""
    parts: list[list[int]] = []
    for count in counts:
        if parts and parts[-1][0] == count:
            parts[-1][1] += 1
        else:
            parts.append([count, 1])
    return ", ".join(f"{c} x {n}" if n > 1 else str(c) for c, n in parts)


def _memory_lines(memory: RankMemory, strategy: Strategy) -> list[str]:
    peaks = memory.peak_bytes(strategy)
    fullest = peaks.index(max(peaks))
    stage = memory.stages(strategy)[fullest]
    live = memory.live(strategy)[fullest]
    parts = [
        ("parameters", stage.parameter_bytes, "weights of this rank's layers, 2 B each"),
        ("gradients", stage.gradient_bytes, "one for each parameter"),
        ("master weights", stage.master_bytes, "4 B a parameter, shared by replicas if sharded"),
        ("optimizer", stage.optimizer_bytes, "moments, shared by replicas if sharded"),
        (
            "one microbatch keeps",
            stage.activation_bytes,
            f"up to {live} are live: {strategy.schedule}",
        ),
        ("recomputed", stage.recompute_bytes, "comes back for one layer during its backward"),
        ("workspace", stage.workspace_bytes, "gradients and temporaries of the largest layer"),
        ("buffers", stage.communication_bytes, "of exchange and pipeline"),
    ]
    lines = [f"memory of stage {fullest} on the fullest rank, {fullest}, GiB"]
    lines += [f"  {name:<24} {size / 2**30:>9.3f}  {words}" for name, size, words in parts]
    lines.append(f"  {'peak':<24} {peaks[fullest] / 2**30:>9.3f}  static + live + what works then")
    return lines


def _layer_lines(time: LayerTime) -> list[str]:
    names = dict.fromkeys([*time.forward, *time.backward_input, *time.backward_weight])
    lines = [f"  {'term':<24} {'forward':>9} {'d input':>9} {'d weight':>9}  formula"]
    tables = (time.forward, time.backward_input, time.backward_weight)
    for name in names:
        cells = " ".join(f"{table.get(name, 0.0) * 1e3:>9.3f}" for table in tables)
        lines.append(f"  {name:<24} {cells}  {formula_of(name)}")
    for name, seconds in time.recompute.items():
        lines.append(f"  {name:<24} {'':>9} {seconds * 1e3:>9.3f} {'':>9}  {formula_of(name)}")
    if time.exchange is not None:
        back = time.exchange_s * (2 if time.is_exchange_recomputed else 1)
        cells = f"{time.exchange_s * 1e3:>9.3f} {back * 1e3:>9.3f} {0.0:>9.3f}"
        lines.append(f"  {'exchange':<24} {cells}  {FORMULAS['exchange']}")
        lines += textwrap.wrap(
            time.exchange.reason, 96, initial_indent="  ", subsequent_indent="  "
        )
    return lines


def _step_lines(steps: StepModel, strategy: Strategy, step: StepTime) -> list[str]:
    *_, last = steps.layers.stages(strategy.layers_per_stage)
    finish = steps.finish_terms(strategy, last)
    head = [
        sum(terms.get(name, 0.0) for terms in steps.head_terms(strategy))
        for name in ("head", "loss")
    ]
    once = [
        ("embedding", 2 * steps.embedding_s(strategy)),
        ("head", head[0]),
        ("loss", head[1]),
        ("send", steps.boundary_s(strategy) if strategy.pp > 1 else 0.0),
        *finish.items(),
    ]
    lines = ["a microbatch at the ends, and the last stage once a step, ms"]
    lines += [f"  {name:<24} {seconds * 1e3:>9.3f}  {FORMULAS[name]}" for name, seconds in once]
    lines += [
        "",
        f"step: {strategy.schedule} of {strategy.num_microbatches} microbatches, played out",
    ]
    lines.append(f"  seconds      {step.step_s:>9.4f}")
    lines.append(f"  bubble       {step.timeline.bubble_share:>9.1%}  idle share of the pipeline")
    lines.append(f"  MFU          {step.mfu:>9.1%}  6 FLOP a token and active weight + attention")
    lines.append(f"  tokens/s     {step.tokens_per_s:>9.0f}")
    return lines
