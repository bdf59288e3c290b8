#!/bin/sh
# Constitutional AI on a CPU in minutes: sh recipes/constitutional/run.sh
# A rude model answers, criticises its answers by a principle and revises them; DPO learns from the pairs. The last
# command prints how often held-out prompts get a rude answer before and after.
set -e
python recipes/make_data.py
bessemer train recipes/constitutional/sft.yaml
bessemer export runs/rude --to hf
rm -f recipes/data/revised.jsonl
bessemer align critique runs/rude/export/hf --principles recipes/constitutional/principles.yaml \
  --prompts recipes/data/critique-prompts.txt --measure words:rubbish,awful --max-tokens 16 \
  --write recipes/data/revised.jsonl
bessemer train recipes/constitutional/dpo.yaml
bessemer align measure runs/polite --before runs/rude --measure words:rubbish,awful --max-tokens 16 --samples 10 \
  --prompts recipes/data/critique-test.txt
