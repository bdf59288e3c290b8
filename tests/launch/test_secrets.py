"""No secret gets into a generated file, and ordinary text is no secret."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.launch.request import KEY_NAMES, LaunchRequest, environment_secrets, find_secrets
from bessemer.launch.submit import generate_files

ROOT = Path(__file__).parents[2]
# Put together here, so that no scanner takes this file for a leak.
TOKENS = {
    "a Hugging Face token": "hf_" + "aB3dE5gH7j" * 4,
    "an AWS access key": "AKIA" + "ABCDEFGH12345678",
    "an AWS secret key": "AWS_SECRET_ACCESS_KEY=" + "abcdefghij0123456789" * 2,
    "a GitHub token": "ghp_" + "a1B2c3" * 7,
    "a Google API key": "AIza" + "Sy0123456789abcdefghijklmnopqrstuvw",
    "a Slack token": "xoxb-" + "123456789012-abcdefghijk",
    "an API key that begins with sk-": "sk-" + "proj-abcdef0123456789xyz",
    "a W&B key": "WANDB_API_KEY: " + "0123456789abcdef0123" * 2,
    "a private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----",
    "a password in a URL": "https://me:" + "hunter22@host/x",
}


@pytest.mark.parametrize("kind", TOKENS)
def test_known_forms_are_found_by_line(kind: str) -> None:
    assert find_secrets("f.sh", f"first\nexport X='{TOKENS[kind]}'\n", {}) == [f"f.sh:2: {kind}"]


def test_the_environments_own_secrets_are_found_whatever_their_form() -> None:
    value = "q7Zt-93kd_Lw02x"
    environment = {
        "MY_SERVICE_TOKEN": value,
        "HOME": "/home/me",
        "SSH_AUTH_SOCK": "/run/agent.1234",
        "TOKENS": "20000000000",
    }
    assert environment_secrets(environment) == {"MY_SERVICE_TOKEN": value}
    assert find_secrets("a", f"x\ny {value}", environment) == ["a:2: the value of MY_SERVICE_TOKEN"]


def test_a_launch_with_a_secret_is_refused_and_the_secret_not_shown(
    ask: Callable[..., LaunchRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_API_KEY", "q7Zt-93kd_Lw02x")
    with pytest.raises(UserError) as refused:
        generate_files(ask("slurm", account="q7Zt-93kd_Lw02x"))
    assert str(refused.value).startswith("job.sbatch:") and "the value of TEAM_API_KEY" in str(refused.value)
    assert "q7Zt" not in str(refused.value)


def test_the_example_of_an_environment_file_names_every_key_and_holds_none() -> None:
    text = (ROOT / ".env.example").read_text()
    assert find_secrets(".env.example", text, {}) == []
    for key in KEY_NAMES:
        assert f"\n{key}=\n" in text
