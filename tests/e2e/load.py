"""Clients that ask all the time while something is done to the servers."""

import itertools
import threading

import httpx

from tests.rigs.client import MODEL


class Load(threading.Thread):
    """A client that asks for one completion after another."""

    def __init__(self, url: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.num_right = 0
        self.problems: list[str] = []
        self._url, self._cases = url, list(zip(prompts, expected, strict=True))
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=60, verify=False) as client:
            for prompt, expected in itertools.cycle(self._cases):
                if self.done.is_set():
                    return
                body = {"model": MODEL, "prompt": prompt, "max_tokens": len(expected)}
                body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
                try:
                    answer = client.post(f"{self._url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.problems.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.problems.append(answer.text)
                elif answer.json()["choices"][0]["token_ids"] != expected:
                    self.problems.append("other tokens")
                else:
                    self.num_right += 1
