"""Lines of configuration, by what they set and the framework whose run it is."""

from __future__ import annotations

from typing import Any

HF = ("hf_trainer", "trl", "hf")
# What is set -> format -> line. `{}` is the value.
LINES: dict[str, dict[str, str]] = {
    "lr": {
        "hf": "learning_rate={}", "yaml": "learning_rate: {}", "megatron": "--lr {}",
        "deepspeed": '"optimizer": {{"params": {{"lr": {}}}}}', "lightning": "lr={} in configure_optimizers",
        "nanogpt": "learning_rate = {}", "torchtitan": "[optimizer] lr = {}", "bessemer": "optimizer: {{lr: {}}}",
        "verl": "actor_rollout_ref.actor.optim.lr={}", "openrlhf": "--actor_learning_rate {}",
    },
    "warmup": {
        "hf": "warmup_steps={}", "yaml": "warmup_steps: {}", "megatron": "--lr-warmup-iters {}",
        "deepspeed": '"scheduler": {{"params": {{"warmup_num_steps": {}}}}}',
        "lightning": "LinearLR(optimizer, 1e-3, total_iters={}) before the schedule, with interval='step'",
        "nanogpt": "warmup_iters = {}", "torchtitan": "[lr_scheduler] warmup_steps = {}",
        "bessemer": "schedule: {{warmup: {}}}",
    },
    "steps": {
        "hf": "max_steps={}", "yaml": "max_steps: {}", "megatron": "--lr-decay-iters {}",
        "deepspeed": '"scheduler": {{"params": {{"total_num_steps": {}}}}}',
        "lightning": "total_steps={} of the scheduler, with interval='step'", "nanogpt": "lr_decay_iters = {}",
        "torchtitan": "[training] steps = {}", "bessemer": "budget: {{steps: {}}}",
    },
    "clip": {
        "hf": "max_grad_norm={}", "yaml": "max_grad_norm: {}", "megatron": "--clip-grad {}",
        "deepspeed": '"gradient_clipping": {}', "lightning": "Trainer(gradient_clip_val={})",
        "nanogpt": "grad_clip = {}", "torchtitan": "[training] max_norm = {}", "bessemer": "optimizer: {{clip: {}}}",
    },
    "nonfinite": {  # stops at, or shows, a NaN in its own step; clipping by a norm that is NaN spreads it
        "hf": "logging_nan_inf_filter=False", "yaml": "logging_nan_inf_filter: false",
        "megatron": "without --no-check-for-nan-in-loss-and-grad",  # the check is on unless this is given
        "lightning": "Trainer(detect_anomaly=True)",
        "nanogpt": "clip_grad_norm_(model.parameters(), grad_clip, error_if_nonfinite=True)",
    },
    "precision": {
        "hf": "bf16=True, fp16=False", "yaml": "bf16: true", "megatron": "--bf16",
        "deepspeed": '"bf16": {{"enabled": true}}, "fp16": {{"enabled": false}}',
        "lightning": 'Trainer(precision="bf16-mixed")', "nanogpt": "dtype = 'bfloat16'",
        "torchtitan": '[training] mixed_precision_param = "bfloat16"', "bessemer": "precision: bf16",
    },
    "accumulation": {
        "hf": "gradient_accumulation_steps={}", "yaml": "gradient_accumulation_steps: {}",
        "megatron": "--global-batch-size {} times --micro-batch-size times data-parallel ranks",
        "deepspeed": '"gradient_accumulation_steps": {}', "lightning": "Trainer(accumulate_grad_batches={})",
        "nanogpt": "gradient_accumulation_steps = {}",
        "torchtitan": "[training] global_batch_size = {} times local_batch_size times ranks",
    },
    "workers": {
        "hf": "dataloader_num_workers={}", "yaml": "dataloader_num_workers: {}", "megatron": "--num-workers {}",
        "deepspeed": "DataLoader(num_workers={}, pin_memory=True)", "lightning": "DataLoader(num_workers={})",
        "torchtitan": "[training] dataloader.num_workers = {}",
    },
    "save": {
        "hf": "save_steps={}", "yaml": "save_steps: {}", "megatron": "--async-save --save-interval {}",
        "lightning": "ModelCheckpoint(every_n_train_steps={})", "nanogpt": "eval_interval = {}",
        "torchtitan": '[checkpoint] async_mode = "async", interval = {}', "bessemer": "checkpoint: {{every: {}}}",
    },
    "best": {
        "hf": 'load_best_model_at_end=True, metric_for_best_model="eval_loss"', "yaml": "load_best_model_at_end: true",
        "lightning": 'EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")',
        "nanogpt": "always_save_checkpoint = False", "megatron": "--weight-decay 0.1 --attention-dropout 0.1",
        "bessemer": "dropout: {{residual: 0.1}}",
    },
    "epochs": {
        "hf": "num_train_epochs={}", "yaml": "num_train_epochs: {}", "lightning": "Trainer(max_epochs={})",
        "nanogpt": "max_iters for {} epoch", "bessemer": "budget: {{epochs: {}}}",
    },
    "shuffle": {
        "hf": "dataset.shuffle(seed=0) before Trainer, group_by_length=False", "yaml": "group_by_length: false",
        "lightning": "DataLoader(shuffle=True)", "deepspeed": "DataLoader(shuffle=True)",
        "megatron": "--dataloader-type cyclic",
    },
    "resume": {
        "hf": "trainer.train(resume_from_checkpoint=True)", "yaml": "resume_from_checkpoint: true",
        "megatron": "--load DIR without --finetune, --no-load-optim, --override-opt_param-scheduler",
        "deepspeed": "engine.load_checkpoint(DIR, load_optimizer_states=True, load_lr_scheduler_states=True)",
        "lightning": "trainer.fit(model, ckpt_path='last')", "nanogpt": "init_from = 'resume'",
        "torchtitan": '[checkpoint] exclude_from_loading = []', "bessemer": "bessemer train SPEC (resumes by itself)",
    },
    "beta": {"hf": "beta={}", "yaml": "pref_beta: {}", "openrlhf": "--beta {}", "bessemer": "dpo: {{beta: {}}}"},
    "sft_term": {
        "hf": 'loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2]', "yaml": "pref_ftx: 0.2",
        "openrlhf": "--nll_loss_coef 0.2", "bessemer": "dpo: {{sft: 0.2}}",
    },
    "kl": {
        "hf": "beta={}", "verl": "actor_rollout_ref.actor.kl_loss_coef={}", "openrlhf": "--init_kl_coef {}",
        "bessemer": "rl: {{kl: {{beta: {}}}}}",
    },
    "temperature": {
        "hf": "temperature={}, epsilon_high=0.28", "verl": "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "openrlhf": "--temperature {}", "bessemer": "rl: {{temperature: {}, clip_high: 0.28}}",
    },
    "samples": {
        "hf": "num_generations={}", "verl": "actor_rollout_ref.rollout.n={}", "openrlhf": "--n_samples_per_prompt {}",
        "bessemer": "rl: {{samples: {}, dynamic_sampling: true}}",
    },
    "length": {
        "hf": "max_length={}", "yaml": "cutoff_len: {}", "verl": "data.max_response_length={}",
        "openrlhf": "--max_new_tokens {}", "megatron": "--seq-length {}",
    },
    "importance": {
        "hf": "vllm_importance_sampling_correction=True", "verl": "actor_rollout_ref.rollout.calculate_log_probs=True",
        "bessemer": "rl: {{correction: {{importance: truncated}}}}",
    },
    "compile": {
        "hf": "torch_compile=True", "yaml": "torch_compile: true", "nanogpt": "compile = True",
        "torchtitan": "[compile] enable = true", "lightning": "torch.compile(model) before Trainer.fit",
        "megatron": "--use-flash-attn --tp-comm-overlap --overlap-grad-reduce", "bessemer": "compile: block",
    },
}  # fmt: skip
STYLES = {
    "hf_trainer": "hf", "trl": "hf", "hf": "hf", "hf_log": "hf", "axolotl": "yaml", "llama_factory": "yaml",
    "nanochat": "nanogpt", "megatron_deepspeed": "megatron", "ours": "bessemer", "lightning_csv": "lightning",
}  # fmt: skip


def config_line(framework: str, setting: str, value: Any = "") -> str:
    """The line as `In FRAMEWORK: LINE`, or nothing where the framework has no such line."""
    style = STYLES.get(framework, framework)
    line = LINES.get(setting, {}).get(style)
    if line is None:
        return ""
    text = f"{value:.2g}" if isinstance(value, float) else str(value)
    if line.startswith("without "):
        return f"Run without `{line.removeprefix('without ')}`: the check that it turns off stops at the first NaN."
    return f"Set `{line.format(text)}`."
