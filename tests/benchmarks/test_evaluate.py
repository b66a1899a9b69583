"""What lm_eval's two backends are told alike."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from benchmarks.evaluate import adds_bos
from tests.make_models import ensure_model


def test_whether_texts_begin_with_a_token_of_the_tokenizers_own(tmp_path: Path) -> None:
    model = ensure_model("gqa")
    assert not adds_bos(model)
    for file in model.glob("*.json"):
        shutil.copy(file, tmp_path)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    first = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
    tokenizer.save(path)
    assert adds_bos(tmp_path)
