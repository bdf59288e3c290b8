"""Prints docs/runbooks.md from the table of causes."""

from bessemer.diagnose.rules.runbook import FAMILIES, RUNBOOK


def runbook_markdown() -> str:
    lines = [
        "# Runbooks", "",
        "The causes that `bessemer diagnose` names for a run's curves: what confirms each, and what repairs it.",
        "The identifiers are the `rule` of findings. Written by `python -m bessemer.diagnose.rules`.",
    ]  # fmt: skip
    for family, title in FAMILIES.items():
        lines += ["", f"## {title}"]
        for name, entry in RUNBOOK.items():
            if entry.family == family:
                lines += ["", f"### {name}", "", entry.text, "", f"- Check: {entry.check}", f"- Fix: {entry.fix}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(runbook_markdown(), end="")
