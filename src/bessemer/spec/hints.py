"""Keys of other tools and their names in Bessemer, for the message about an unknown key.

From Hugging Face's TrainingArguments and config.json, TRL, Axolotl, LLaMA-Factory, torchtitan, Megatron and nanoGPT.
"""

from __future__ import annotations

from typing import Any

from bessemer.spec.rl import RL_OBJECTIVES

# key of Bessemer -> (keys of other tools, a note)
FOREIGN: dict[str, tuple[str, str]] = {
    "runs": (
        "output_dir out_dir dump_folder save_dir logging_dir report_to use_wandb wandb_project wandb_entity "
        "wandb_run_id wandb_name enable_wandb enable_tensorboard",
        "a run is the folder RUNS/NAME with metrics and checkpoints",
    ),
    "name": ("run_name wandb_run_name experiment_name overwrite_output_dir job", ""),
    "seed": ("random_seed data_seed manual_seed", ""),
    "objective": ("stage finetuning_type rl_algorithm training_type", ""),
    "model.hf": (
        "model_name_or_path base_model base_model_config model_name pretrained_model_name_or_path checkpoint_dir "
        "hf_assets_path model_id model_type",
        "a local folder; `hf download ORG/NAME --local-dir FOLDER` downloads a model",
    ),
    "model.preset": ("flavor model_size", ""),
    "model.width": ("n_embd hidden_size d_model dim embed_dim", ""),
    "model.layers": ("n_layer n_layers num_layers num_hidden_layers", ""),
    "model.heads": ("n_head n_heads num_heads num_attention_heads", ""),
    "model.kv_heads": ("num_key_value_heads n_kv_heads n_kv_head num_query_groups", ""),
    "model.ffn": ("intermediate_size ffn_hidden_size ffn_dim n_inner", ""),
    "model.tied": ("tie_word_embeddings enable_weight_tying untie_embeddings_and_output_weights", ""),
    "model.norm_eps": ("rms_norm_eps layer_norm_eps layer_norm_epsilon", ""),
    "model.windows": ("sliding_window", ""),
    "model.rope.theta": ("rope_theta rotary_base", ""),
    "model.rope.scaling": ("rope_scaling rope_type overrides_of_model_config", ""),
    "model.moe.experts": ("num_experts num_local_experts n_routed_experts", ""),
    "model.moe.top_k": ("num_experts_per_tok moe_router_topk", ""),
    "start_from": (
        "resume_from_checkpoint auto_resume_from_checkpoints init_from initial_load_path",
        "a run continues when the same command is run again",
    ),
    "tokenizer.path": ("tokenizer_path tokenizer_name tokenizer_name_or_path tokenizer_model tokenizer_config", ""),
    "tokenizer.vocab": ("vocab_size", ""),
    "tokenizer.special": ("special_tokens additional_special_tokens new_special_tokens", ""),
    "tokenizer.chat": ("chat_template template conversation_template", ""),
    "tokenizer.learn": ("train_on_inputs roles_to_train assistant_only_loss completion_only_loss mask_history", ""),
    "data.sources": (
        "datasets dataset dataset_name dataset_path dataset_dir train_file train_data data_path dataset_mixer "
        "test_datasets pretraining_dataset remove_unused_columns",
        "",
    ),
    "data.context": (
        "sequence_len max_seq_length max_seq_len max_length cutoff_len block_size seq_len seq_length n_ctx "
        "context_length model_max_length max_position_embeddings n_positions max_prompt_length max_completion_length",
        "",
    ),
    "dpo.loss": ("loss_type reference_free", ""),
    "dpo.sft": ("rpo_alpha cpo_alpha pref_ftx", "the weight of the chosen answer's cross-entropy"),
    "dpo.margin": ("simpo_gamma gamma_beta_ratio", ""),
    "dpo.divergence": ("f_divergence_type", "js_divergence is js, alpha_divergence is alpha"),
    "dpo.alpha": ("f_alpha_divergence_coef", ""),
    "dpo.reference": ("precompute_ref_log_probs precompute_ref_logps", ""),
    "models": ("ref_model ref_model_path ref_model_name_or_path ref_adapter_name", "by default the reference is the "
               "model that the run starts from"),
    "data.packing": ("sample_packing pad_to_sequence_len eval_packing neat_packing packing_strategy", ""),
    "data.validation": ("val_set_size val_size validation_split eval_dataset validation_file", ""),
    "budget.tokens": ("train_tokens max_tokens num_tokens total_tokens", ""),
    "budget.steps": ("max_steps max_iters train_iters total_steps num_train_steps lr_decay_iters lr_decay_steps", ""),
    "budget.epochs": ("num_train_epochs num_epochs max_epochs n_epochs", ""),
    "budget.batch": (
        "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps global_batch_size "
        "train_batch_size total_batch_size",
        "tokens per step, divided into micro-batches automatically",
    ),
    "budget.micro_batch": (
        "micro_batch_size per_device_train_batch_size per_device_batch_size local_batch_size batch_size "
        "device_batch_size auto_find_batch_size",
        "in sequences; budget.batch is the tokens per step",
    ),
    "budget.stop.patience": ("early_stopping_patience", ""),
    "optimizer.name": ("optim optimizer_name optimizer_type", ""),
    "optimizer.lr": ("learning_rate lr_rate max_lr peak_lr", ""),
    "optimizer.betas": ("adam_beta1 adam_beta2 beta1 beta2", ""),
    "optimizer.eps": ("adam_epsilon adam_eps", ""),
    "optimizer.clip": ("max_grad_norm grad_clip clip_grad max_norm gradient_clip_val gradient_clipping", ""),
    "optimizer.ema": ("ema_decay", ""),
    "optimizer.freeze": (
        "unfrozen_parameters freeze_trainable_layers freeze_trainable_modules",
        "all weights except those listed here are trained",
    ),
    "adapter.kind": ("lora peft qlora peft_config use_peft use_dora use_rslora init_lora_weights", ""),
    "adapter.base": ("load_in_4bit bnb_4bit_quant_type bnb_4bit_use_double_quant quantization_config", ""),
    "adapter.rank": ("lora_r lora_rank r", ""),
    "adapter.alpha": ("lora_alpha", ""),
    "adapter.dropout": ("lora_dropout", ""),
    "adapter.targets": ("lora_target lora_target_modules lora_target_linear target_modules", ""),
    "adapter.modules_to_save": ("lora_modules_to_save", ""),
    "adapter.lr_ratio": ("loraplus_lr_ratio", ""),
    "adapter.virtual_tokens": ("num_virtual_tokens", ""),
    "distill.on_policy": ("lmbda", ""),
    "adapter.path": ("lora_model_dir adapter_name_or_path", ""),
    "schedule.kind": ("lr_scheduler_type lr_scheduler lr_scheduler_kwargs scheduler decay_lr decay_type", ""),
    "schedule.warmup": ("warmup_ratio warmup_steps warmup_iters lr_warmup_iters lr_warmup_fraction", ""),
    "schedule.floor": (
        "min_lr min_lr_ratio min_lr_factor cosine_min_lr_ratio cosine_constant_lr_ratio",
        "as a share of the peak",
    ),
    "loss.smoothing": ("label_smoothing_factor label_smoothing", ""),
    "loss.z": ("z_loss z_loss_weight", ""),
    "dropout.attention": ("attention_dropout attn_pdrop attn_dropout", ""),
    "dropout.residual": ("hidden_dropout resid_pdrop residual_dropout", ""),
    "dropout.embedding": ("embd_pdrop embedding_dropout", ""),
    "precision": (
        "bf16 fp16 tf32 fp8 float16 bfloat16 dtype torch_dtype pure_bf16 mixed_precision mixed_precision_param "
        "bf16_full_eval flash_attention flash_attn attn_implementation",
        "attention uses the fastest kernel of the device",
    ),
    "compile": ("torch_compile torch_compile_backend enable_compile", ""),
    "memory.activations": (
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpoint activation_checkpointing "
        "recompute_granularity",
        "",
    ),
    "memory.offload_activations": ("activation_offloading", ""),
    "memory.offload_optimizer": ("enable_cpu_offload cpu_offload offload_optimizer_states", ""),
    "memory.moments": (
        "load_in_8bit quantization_bit",
        "weights are quantized to 4 bits only (adapter.base: nf4); moments can be, see also memory.weights",
    ),
    "parallel.threads": ("num_threads omp_num_threads", ""),
    "data.workers": ("num_workers dataloader_num_workers dataloader_workers", "threads, not processes"),
    "parallel.engine": (
        "deepspeed deepspeed_config",
        "write deepspeed; its settings are in parallel.deepspeed, not in a JSON file",
    ),
    "parallel.deepspeed.zero": ("zero_stage zero_optimization", ""),
    "parallel.dp_shard": (
        "fsdp fsdp_config fsdp_version data_parallel_shard_degree fsdp_transformer_layer_cls_to_wrap", "",
    ),
    "parallel.dp_replicate": (
        "data_parallel_replicate_degree data_parallel_size dp_size dp dp_degree data_parallel data_parallelism ddp",
        "or parallel.dp_shard, which shards the weights",
    ),
    "parallel.tp": (
        "tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size tensor_parallel tensor_parallelism "
        "tp_size tp_degree",
        "",
    ),
    "parallel.cp": (
        "context_parallel_degree context_parallel_size sequence_parallel_degree sequence_parallel_size "
        "context_parallel context_parallelism cp_size cp_degree",
        "",
    ),
    "parallel.sequence": ("sequence_parallel sequence_parallelism", ""),
    "parallel.pp": (
        "pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel "
        "pipeline_parallelism pp_size pp_degree",
        "",
    ),
    "parallel.ep": (
        "expert_parallel_degree expert_parallel_size expert_model_parallel_size expert_parallel expert_parallelism "
        "ep_size ep_degree",
        "",
    ),
    "parallel.patience": ("ddp_timeout", ""),
    "checkpoint.every": ("save_steps save_interval checkpoint_interval save_strategy saves_per_epoch", ""),
    "checkpoint.keep_last": ("save_total_limit keep_latest_k max_checkpoints", ""),
    "checkpoint.keep_best": ("load_best_model_at_end metric_for_best_model", ""),
    "checkpoint.asynchronous": ("async_mode async_save", ""),
    "evaluate.every": (
        "eval_steps eval_interval eval_strategy evaluation_strategy evals_per_epoch do_eval eval_every", "",
    ),
    "evaluate.tokens": ("eval_iters eval_max_new_tokens eval_batches", ""),
    "observe.line_every": ("logging_steps log_interval log_freq logging_first_step logging_strategy", ""),
    "budget": ("training training_args trainer train", "see also data, optimizer and schedule"),
    "parallel": ("parallelism", ""),
    "observe": ("metrics logging tracker", ""),
}  # fmt: skip
# Keys whose value has the same meaning in other tools, except for the names in _OTHER_VALUE.
_SAME_VALUE = (
    "seed model.width model.layers model.heads model.kv_heads model.ffn model.norm_eps model.rope.theta "
    "model.moe.experts model.moe.top_k tokenizer.vocab data.context budget.tokens budget.steps budget.epochs "
    "budget.micro_batch budget.stop.patience optimizer.lr optimizer.eps optimizer.clip optimizer.ema schedule.warmup "
    "loss.smoothing loss.z dropout.attention dropout.residual dropout.embedding parallel.threads "
    "parallel.deepspeed.zero parallel.dp_shard parallel.dp_replicate parallel.tp parallel.cp parallel.sequence "
    "parallel.pp parallel.ep checkpoint.keep_last checkpoint.every evaluate.every data.validation "
    "schedule.floor dpo.loss dpo.smoothing dpo.sft dpo.margin dpo.alpha kto.loss"
)
_OTHER_VALUE = (
    "lr_decay_iters lr_decay_steps auto_find_batch_size zero_optimization data_seed min_lr cosine_constant_lr_ratio "
    "saves_per_epoch evals_per_epoch reference_free gamma_beta_ratio max_prompt_length max_completion_length"
)
# Names that mean something else with an objective, and notes on single names.
_WITH_OBJECTIVE = {
    ("dpo", "label_smoothing"): "dpo.smoothing",
    ("dpo", "gamma"): "dpo.margin",
    ("kto", "loss_type"): "kto.loss",
    ("gkd", "beta"): "distill.beta",
}
# The names of TRL's GRPO and RLOO trainers.
_OF_RL = {
    "max_completion_length": "rl.max_tokens", "max_new_tokens": "rl.max_tokens", "num_generations": "rl.samples",
    "num_iterations": "rl.epochs", "num_ppo_epochs": "rl.epochs", "steps_per_generation": "rl.minibatches",
    "num_mini_batches": "rl.minibatches", "reward_funcs": "rl.rewards", "reward_weights": "rl.rewards",
    "beta": "rl.kl.beta", "kl_coef": "rl.kl.beta", "epsilon": "rl.clip", "cliprange": "rl.clip",
    "epsilon_high": "rl.clip_high", "delta": "rl.dual_clip", "loss_type": "rl.aggregate",
    "scale_rewards": "rl.advantage", "mask_truncated_completions": "rl.mask_truncated", "lam": "rl.ppo.lam",
    "gamma": "rl.ppo.gamma", "vf_coef": "rl.ppo.value_weight", "cliprange_value": "rl.ppo.value_clip",
}  # fmt: skip
_NOTES = {
    "max_prompt_length": "of a prompt and its answers together; prompts alone have no limit, and nothing is cut",
    "max_completion_length": "of a prompt and its answers together; answers alone have no limit, and nothing is cut",
    "remove_unused_columns": "only the columns that a source names are read: remove the key",
    "reference_free": "losses without a reference are simpo and orpo",
    "gamma_beta_ratio": "gamma itself: the ratio times beta",
}
_RL_NOTES = {
    "rl.rewards": "each part by name, with its own weight",
    "rl.aggregate": "token is dapo, sequence is grpo, constant is dr_grpo; rl.loss chooses gspo, cispo and others",
    "rl.advantage": "group_std, group (without division) or batch_std",
}
_PRECISIONS = {
    "float32": "fp32", "fp32": "fp32", "32": "fp32", "tf32": "tf32", "float16": "fp16", "fp16": "fp16", "half": "fp16",
    "16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "pure_bf16": "bf16", "fp8": "fp8",
}  # fmt: skip
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
# The key that a single value of a section is for, if not the first key of the section.
MAIN_KEY = {"tokenizer": "path", "dropout": "residual"}
_OUR_KEYS = {name: key for key, (names, _) in FOREIGN.items() for name in names.split()}


def our_key(name: str, objective: str = "") -> str | None:
    """Bessemer's dotted key for the key `name` of another tool."""
    name = name.lower().replace("-", "_")
    of_rl = _OF_RL.get(name) if objective in ("rl", *RL_OBJECTIVES) else None
    return _WITH_OBJECTIVE.get((objective, name)) or of_rl or _OUR_KEYS.get(name)


def note_on(name: str, key: str) -> str:
    """What to know about another tool's key; empty if nothing."""
    if key.startswith("rl."):
        return _RL_NOTES.get(key, "")
    return _NOTES.get(name.lower().replace("-", "_")) or FOREIGN.get(key, ("", ""))[1]


def our_value(name: str, value: Any, objective: str = "") -> Any:
    """The value in Bessemer of another tool's key; None if its meaning differs."""
    name, key = name.lower().replace("-", "_"), our_key(name, objective)
    if key == "precision":
        text = str(value).lower().removeprefix("torch.")
        if name in _PRECISIONS and text in SWITCH:  # `fp16: true`, in contrast to `dtype: float16`
            return _PRECISIONS[name] if SWITCH[text] else "auto"
        return _PRECISIONS.get(text)
    return value if key in _SAME_VALUE.split() and name not in _OTHER_VALUE.split() else None
