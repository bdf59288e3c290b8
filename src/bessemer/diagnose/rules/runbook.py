"""The causes that the rules name: what each is, what confirms it and what repairs it.

`python -m bessemer.diagnose.rules` prints them as the page docs/runbooks.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunbookEntry:
    family: str
    text: str  # the cause, in a sentence
    check: str  # what confirms it or rules it out
    fix: str  # in words; the finding adds a line of the framework's configuration
    setting: str = ""  # what that line sets: a key of `config.LINES`
    factor: float = 1.0  # on the present value, where it is known


RUNBOOK: dict[str, RunbookEntry] = {
    # --- the loss
    "bad_batch": RunbookEntry(
        "loss", "A batch of corrupt or foreign data: the loss jumps in its own step and is back at once.",
        "Decode the rows of that step. Replay the step from an earlier checkpoint: the same rows spike again.",
        "Remove the rows from the data, or skip the batch and continue from the checkpoint before it.", "clip"),
    "weights_damaged": RunbookEntry(
        "loss", "The weights or the optimizer's state changed at once (a bad update, memory or a partial load): the "
        "loss jumps, and comes back slowly or not at all.",
        "Evaluate the checkpoints before and after the jump on the same batch; compare weights between ranks.",
        "Continue from the last checkpoint before the jump."),
    "nonfinite_input": RunbookEntry(
        "loss", "The loss becomes NaN or infinite without a warning sign: an input, a division by zero or an overflow.",
        "Run the step under torch.autograd.set_detect_anomaly, and look for empty rows or zero divisors in its batch.",
        "Stop at the first value that is not finite, continue from the checkpoint before it, and repair the rows or "
        "the operation; clipping does not remove a NaN.", "nonfinite"),
    "loss_summed_over_accumulation": RunbookEntry(
        "loss", "The loss is summed over the micro-batches of gradient accumulation instead of averaged: it, and the "
        "gradient, are too large by their number.",
        "Run a few steps without accumulation at the same global batch: the loss should not change.",
        "Divide the loss of each micro-batch by their number (or by the tokens of the global batch)."),
    "loss_divided_twice": RunbookEntry(
        "loss", "The loss is divided by the number of micro-batches twice: it, and the gradient, are too small.",
        "Run a few steps without accumulation at the same global batch: the loss should not change.",
        "Divide once: by the framework or by your code, not by both."),
    "initial_loss_above_uniform": RunbookEntry(
        "loss", "The model starts worse than a uniform guess: the tokenizer is not the model's, the chat template is "
        "wrong, embeddings were resized or initialised with too large a scale.",
        "Compare ln(vocabulary) with the loss of the first batch; decode a batch; compare the two vocabularies.",
        "Use the tokenizer and template of the checkpoint; initialise new embeddings and the head with a small scale."),
    "labels_masked": RunbookEntry(
        "loss", "All labels are masked (-100), in all rows or in some batches: the mean over no tokens is 0 or NaN.",
        "Count labels that are not -100 in the first batches; print the mask of one row.",
        "Repair the template's answer markers, or raise the length limit so that answers are not cut off.",
        "length", 2.0),
    "labels_not_shifted": RunbookEntry(
        "loss", "The model sees what it has to predict (labels that are not shifted, or a broken mask): the loss falls "
        "to almost zero, held-out loss too.",
        "Compare input_ids and labels of a row at one position; sample text from the model: it will be nonsense.",
        "Shift labels by one, once: either in the data or in the model. Check that attention is causal."),
    "weights_frozen": RunbookEntry(
        "loss", "Nothing is trained: the optimizer has other parameters than the model, everything is frozen, or the "
        "rate is zero.",
        "Compare a weight before and after a step; count parameters with requires_grad that the optimizer holds.",
        "Build the optimizer after the model is wrapped, from its trainable parameters."),
    "diverged": RunbookEntry(
        "loss", "The loss rises and stays up, and the curves do not tell why.",
        "Replay from the last good checkpoint with other data, then with half the rate.",
        "Continue from the last good checkpoint.", "lr", 1 / 2),
    "plateau": RunbookEntry(
        "loss", "The loss has stopped falling while the rate is still high: the model has learned what it can at "
        "this rate.",
        "Lower the rate by ten from a checkpoint for a few hundred steps: a fall shows that it was the rate.",
        "Start the decay of the rate now, or use more data or a larger model.", "lr", 1 / 10),
    "data_ordered": RunbookEntry(
        "data", "The data comes in an order: sorted by length, source or topic, so that the loss follows a cycle.",
        "Compare the period with the size of files or sources; plot the loss per source.",
        "Shuffle rows before batches are built.", "shuffle"),
    "epoch_memorised": RunbookEntry(
        "data", "The loss steps down at each start of an epoch: rows that are seen again are remembered.",
        "Plot held-out loss: it does not step down with it.",
        "Train fewer epochs, or use more data or regularisation.", "epochs"),
    "overfitting": RunbookEntry(
        "data", "The model memorises its training data: training loss falls while held-out loss rises.",
        "Evaluate the checkpoint of the lowest held-out loss.",
        "Stop at the lowest held-out loss; fewer epochs, more data, weight decay or dropout.", "best"),
    "validation_leak": RunbookEntry(
        "data", "Held-out rows are in the training data, or the held-out set is not of the same difficulty.",
        "Search held-out rows in the training data (exact and near duplicates); evaluate with dropout off on both.",
        "Remove the duplicates from the training data and evaluate again on rows that were not seen."),
    "validation_mismatch": RunbookEntry(
        "data", "Held-out data differs from training data from the start (another tokenizer, template, source or "
        "mask).",
        "Compute the held-out loss of training rows with the evaluation code: it must equal the training loss.",
        "Prepare both sets with the same code."),
    # --- rates and schedule
    "lr_too_high": RunbookEntry(
        "rates", "The learning rate is too high: the loss rises, oscillates or stays at a high level.",
        "Replay from a checkpoint with a third of the rate, or run a learning-rate range test.",
        "Lower the peak rate to a third and keep clipping on.", "lr", 1 / 3),
    "lr_too_low": RunbookEntry(
        "rates", "The learning rate is too low: the loss falls slowly along a straight line, far from levelling off.",
        "Run 200 steps with three and ten times the rate.", "Raise the peak rate by three to ten.", "lr", 10.0),
    "lr_jump": RunbookEntry(
        "rates", "The learning rate jumped during the run.", "Read the rate around that step.",
        "Repair the schedule, and continue from the checkpoint before the jump.", "lr"),
    "warmup_missing": RunbookEntry(
        "rates", "There is no warm-up, or it is too short: the first large updates damage the weights.",
        "Look at the gradient norm of the first steps; run the first hundred steps again with a warm-up.",
        "Warm up over 1 to 5 % of the steps.", "warmup"),
    "schedule_too_short": RunbookEntry(
        "rates", "The schedule ended long before the run did: the rest is trained at a rate of almost zero.",
        "Compare the length of the schedule with the steps of the run (optimizer steps, not micro-batches).",
        "Set the schedule's length to the number of optimizer steps.", "steps"),
    "schedule_too_long": RunbookEntry(
        "rates", "The run ends before its schedule: the rate has not come down, and the loss it would gain is lost.",
        "Compare the length of the schedule with the steps of the run (scheduler.step once per optimizer step?).",
        "Set the schedule's length to the number of optimizer steps, or decay from the last checkpoint.", "steps"),
    "schedule_restarted": RunbookEntry(
        "rates", "The schedule started again when the run was resumed: its state was not restored.",
        "Compare the rate before and after the restart; look for the scheduler's state in the checkpoint.",
        "Save and load the scheduler, or give it last_epoch; continue from the checkpoint before.", "resume"),
    "optimizer_state_lost": RunbookEntry(
        "rates", "The run was resumed without the optimizer's state: moments start at zero, so the loss jumps.",
        "Look for the optimizer's state in the checkpoint and in the call that loads it.",
        "Load the optimizer with the model; if it is lost, warm up again.", "resume"),
    "data_repeated_at_resume": RunbookEntry(
        "rates", "After the restart the loss steps down: the data starts from the beginning and is seen again.",
        "Compare row identifiers of the first steps with those after the restart.",
        "Save and restore the position in the data.", "resume"),
    "batch_too_small": RunbookEntry(
        "rates", "The batch is small: the noise of single steps is larger than what the model still learns.",
        "Measure the gradient noise scale; double the accumulation from a checkpoint.",
        "Raise the global batch by accumulation, or lower the rate.", "accumulation", 4.0),
    "batch_too_large": RunbookEntry(
        "rates", "The batch is far above the noise: almost all data of a step repeats what the others say, and the run "
        "has few updates.",
        "Measure the gradient noise scale; run with a quarter of the batch at half the rate.",
        "Lower the global batch and take more steps."),
    # --- precision and the inside of the model
    "fp16_overflow": RunbookEntry(
        "precision", "fp16 overflows: the loss scale is halved again and again and updates are skipped.",
        "Look at the largest activations and gradients; run 100 steps in bf16.",
        "Use bf16, which needs no loss scale.", "precision"),
    "bf16_updates_lost": RunbookEntry(
        "precision", "Weights are held in bf16: updates below 1/256 of a weight are rounded away, so training stalls.",
        "Count weights that a step leaves unchanged; run 100 steps with fp32 master weights.",
        "Keep fp32 master weights (autocast instead of model.bfloat16()), or stochastic rounding.", "precision"),
    "dead_units": RunbookEntry(
        "model", "A growing share of units never fires: their gradients are zero for good.",
        "Measure activations per layer.", "Lower the rate, use GELU or SiLU, and check the initial scale.",
        "lr", 1 / 3),
    "router_collapse": RunbookEntry(
        "model", "The router sends most tokens to few experts; the others are not trained.",
        "Plot the share of tokens per expert and layer.",
        "Raise the balance loss, or use a bias that is adjusted for balance; lower the router's rate."),
    "gradient_explosion": RunbookEntry(
        "model", "Gradients grow by orders of magnitude: a divergence announces itself before the loss shows it.",
        "Look at gradient norms per layer, and at attention logits.",
        "Lower the rate or clip; add QK-norm or z-loss when logits grow.", "clip"),
    "gradient_vanishing": RunbookEntry(
        "model", "The gradient is almost zero while the loss is high: nothing is learned.",
        "Look at gradient norms per layer: is one of them zero?",
        "Check initial scale, normalisation, saturated activations and detached tensors."),
    # --- speed
    "slow_data": RunbookEntry(
        "speed", "Steps wait for data: the loader is slower than the device.",
        "Time the loader alone; watch the processors and the disk.",
        "More workers, prefetching, tokens prepared once, local disks.", "workers"),
    "periodic_stall": RunbookEntry(
        "speed", "Steps stall at a fixed distance: checkpoints, evaluation or logging.",
        "Compare the period with the intervals of saving and evaluation.",
        "Save in the background, or less often.", "save"),
    "worker_stall": RunbookEntry(
        "speed", "Every few steps the loop waits: the loader's workers deliver in bursts.",
        "Compare the period with the number of workers.", "More workers and a larger prefetch factor.", "workers"),
    "step_time_grows": RunbookEntry(
        "speed", "Steps become slower all the time: something is kept (losses with graphs, caches, lists, hooks).",
        "Plot memory; profile a late step against an early one.",
        "Log loss.item(), not the tensor; bound caches and lists; remove hooks after use."),
    "memory_leak": RunbookEntry(
        "speed", "Memory grows all the time and will end in an out-of-memory error.",
        "Take memory snapshots at two steps; compare live tensors.",
        "Log loss.item(), not the tensor; delete references; bound caches."),
    "slowed_down": RunbookEntry(
        "speed", "From one step on the run is slower: clocks were throttled, a neighbour took the machine, a link or "
        "disk degraded.",
        "Read clocks, temperature and throttle reasons of each device; time ranks one by one.",
        "Drain the slow node, or free the machine."),
    "stragglers": RunbookEntry(
        "speed", "Single steps take far longer without a period: a rank, a disk or the network stalls.",
        "Log step times per rank; the one that waits least is the slow one.", "Drain the slow node."),
    "low_mfu": RunbookEntry(
        "speed", "The device computes far below its peak.",
        "Profile ten steps: kernels, gaps, communication, copies.",
        "Larger micro-batches, torch.compile, fused attention, bf16; less recomputation.", "compile"),
    "poor_scaling": RunbookEntry(
        "speed", "More devices bring much less than their share: communication is not hidden, or the work is too "
        "small.",
        "Measure all-reduce bandwidth; profile communication that does not overlap; compare per-device batches.",
        "Larger batches per device, overlap, sharding inside a node only, checked links (P2P, InfiniBand).",
        "accumulation", 4.0),
    # --- preference training
    "reference_mismatch": RunbookEntry(
        "preference", "The first loss is not ln 2: the reference is not the model that training starts from, or "
        "dropout "
        "is on in one of them.",
        "Compute the margin before the first update: it must be 0.",
        "Use the starting weights as the reference and turn dropout off."),
    "likelihood_displacement": RunbookEntry(
        "preference", "The probability of chosen answers falls with that of rejected ones: the margin grows by making "
        "both unlikely.",
        "Sample answers; plot both log-probabilities; look for pairs that differ in few tokens.",
        "Add a cross-entropy term on chosen answers, raise beta, or drop near-equal pairs.", "sft_term"),
    "trivial_pairs": RunbookEntry(
        "preference", "Pairs are told apart by something trivial (length, format, source): accuracy is 1 within a few "
        "steps.",
        "Sort pairs by length difference; train a classifier on length alone.",
        "Balance pairs for length and format; lower the rate.", "lr", 1 / 3),
    "margin_without_accuracy": RunbookEntry(
        "preference", "The margin grows while accuracy does not: few pairs are pushed ever further, labels may be "
        "noisy.",
        "Look at the distribution of margins; check labels of the pairs with the most negative ones.",
        "Clean labels, use label smoothing or IPO, raise beta.", "beta", 3.0),
    # --- reinforcement learning
    "kl_blowup": RunbookEntry(
        "reinforcement", "The policy runs away from the reference.",
        "Read samples of the last steps; compare reward with a held-out judge.",
        "Raise the KL weight, lower the rate, and continue from before the rise.", "kl"),
    "entropy_collapse": RunbookEntry(
        "reinforcement", "The policy has become deterministic: it no longer explores.",
        "Count distinct answers of a group.",
        "Raise clip_high (DAPO) or an entropy bonus, the temperature, or lower the rate.", "temperature"),
    "flat_groups": RunbookEntry(
        "reinforcement", "Most groups have equal rewards: they give no gradient.",
        "Plot the pass rate of prompts: too easy, too hard, or a reward that is constant?",
        "Choose prompts of medium difficulty, more answers per prompt, or dynamic sampling.", "samples", 2.0),
    "reward_hacking": RunbookEntry(
        "reinforcement", "The reward rises by something that is not quality: answers grow with it, held-out scores "
        "do not.",
        "Read the answers of highest reward; correlate reward with length; ask another judge.",
        "Repair the reward, penalise length, and continue from before.", "kl"),
    "length_growth": RunbookEntry(
        "reinforcement", "Answers grow while the reward does not.",
        "Look at the loss's aggregation: means per sequence favour long wrong answers.",
        "Use the token mean (DAPO) or a penalty on overlong answers.", "length"),
    "answers_cut": RunbookEntry(
        "reinforcement", "Many answers reach the length limit and are cut before they end.",
        "Read cut answers: do they loop, or are they unfinished? Is the end token right?",
        "Raise the limit, mask cut answers, and check the end token.", "length", 2.0),
    "generator_mismatch": RunbookEntry(
        "reinforcement", "The generator's probabilities are not the trainer's: other precision, kernels or stale "
        "weights.",
        "Compute log-probabilities of the same answer with both.",
        "Sync weights each round; truncate importance ratios; use the same precision.", "importance"),
    "reward_collapse": RunbookEntry(
        "reinforcement", "The reward falls and stays down: an update broke the policy.",
        "Read samples before and after; look at KL, entropy and the gradient norm at the fall.",
        "Continue from the checkpoint before, with a lower rate.", "lr", 1 / 3),
}  # fmt: skip

FAMILIES = {
    "loss": "Loss", "data": "Data and validation", "rates": "Learning rate, schedule, batch and resume",
    "precision": "Precision", "model": "Gradients and the model", "speed": "Speed and memory",
    "preference": "Preference training (DPO and relatives)", "reinforcement": "Reinforcement learning",
}  # fmt: skip
