import pytest

from shoal.jobs.secret_settings import command_without_secrets, is_hidden, is_secret, without_hidden, without_secrets


@pytest.mark.parametrize(
    "name", ["hf_token", "API_TOKEN", "password", "db_password_2", "secret", "aws_secret_id", "a_key"]
)
def test_settings_with_these_names_are_hidden(name: str) -> None:
    shown = without_secrets({"model": {name: "abc"}, name: "abd", "lr": 0.1})
    assert shown["model"][name].startswith("<hidden> ")
    assert shown[name].startswith("<hidden> ")
    assert shown["model"][name] != shown[name]
    assert shown == without_secrets(shown)
    assert shown["lr"] == 0.1
    assert command_without_secrets([f"{name}=abc", f"--set=a.{name}=abc"]) == [
        f"{name}=<hidden>",
        f"--set=a.{name}=<hidden>",
    ]


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 512), ("tokenizer", "gpt2"), ("keyboard", "de"), ("token", None)]
)
def test_other_settings_are_shown(name: str, value: object) -> None:
    assert not is_secret(name, value)
    assert without_secrets({name: value}) == {name: value}


def test_texts_below_a_secret_name_are_hidden() -> None:
    shown = without_secrets({"api_token": {"value": "abc", "count": 3}, "lr": "0.1"})
    assert is_hidden(shown["api_token"])
    assert shown["api_token"]["count"] == 3
    assert without_hidden(shown) == {"lr": "0.1"}


def test_secrets_of_a_program_s_own_options_are_hidden() -> None:
    words = ["train.py", "--api-token", "abc", "--db-password=abc", "--set", "secret.value=abc", "--token", "--lr", "1"]
    hidden = ["train.py", "--api-token", "<hidden>", "--db-password=<hidden>", "--set", "secret.value=<hidden>"]
    assert command_without_secrets(words) == [*hidden, "--token", "--lr", "1"]
