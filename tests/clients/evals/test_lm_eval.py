"""EleutherAI's harness through local-completions, on a small task: its score is the one computed
here from the logprobs of the same texts.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from tests.support.account import MODEL, Account

TASK = "hearth_small"
QUESTIONS: list[dict[str, Any]] = [
    {"question": "2 + 2 =", "choices": [" 4", " five", " 22"], "answer": 0},
    {"question": "The sky is", "choices": [" green", " blue"], "answer": 1},
    {"question": "PEP 8 is about", "choices": [" style", " cooking", " maps"], "answer": 0},
    {"question": "Water is", "choices": [" dry", " wet", " a metal", " loud"], "answer": 1},
    {"question": "A dog has", "choices": [" four legs", " two wings"], "answer": 0},
    {"question": "Ice is", "choices": [" hot", " cold"], "answer": 1},
]


def write_task(folder: Path) -> Path:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / f"{TASK}.yaml").write_text(json.dumps(task))  # which is YAML
    return folder


class Direct:
    """The score without the harness."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def loglikelihood(self, question: str, choice: str) -> float:
        """Of the tokens of `choice` after `question`."""
        num_context = len(self._tokens(question))
        body = {
            "model": MODEL,
            "prompt": self._tokens(question + choice),
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
        }
        answer = self._post("/v1/completions", body)
        return sum(answer["choices"][0]["logprobs"]["token_logprobs"][num_context:])

    def accuracy(self) -> float:
        return sum(self._is_right(each) for each in QUESTIONS) / len(QUESTIONS)

    def _is_right(self, each: dict[str, Any]) -> bool:
        scores = [self.loglikelihood(each["question"], choice) for choice in each["choices"]]
        return scores.index(max(scores)) == each["answer"]

    def _tokens(self, text: str) -> list[int]:
        body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
        return self._post("/tokenize", body)["tokens"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture
def evaluated(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("OPENAI_API_KEY", account.token)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    folder = tmp_path / "task"
    folder.mkdir()
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{account.url}/v1/completions",
            "auth_token": account.token,
            "tokenizer_backend": "remote",
            "max_retries": 1,
        },
        tasks=[TASK],
        task_manager=TaskManager(include_path=str(write_task(folder)), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    return found


def test_score_is_the_one_computed_directly(evaluated: dict[str, Any], account: Account) -> None:
    with httpx.Client(base_url=account.url, headers=account.headers, timeout=60) as http:
        direct = Direct(http)
        assert evaluated["results"][TASK]["acc,none"] == pytest.approx(direct.accuracy())
        samples = evaluated["samples"][TASK]
        assert len(samples) == len(QUESTIONS)
        for each in samples:
            choices = each["doc"]["choices"]
            expected = [direct.loglikelihood(each["doc"]["question"], text) for text in choices]
            found = [float(response[0][0]) for response in each["resps"]]
            assert found == pytest.approx(expected, abs=1e-3)
