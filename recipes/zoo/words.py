"""A word splitter as it is installed: AttaCut's network for Thai (Chormai et al. 2019), letter by letter.

python -m recipes.zoo.words            four kinds of text; seconds on one core
python -m recipes.zoo.words --smoke    eight sentences of each; seconds
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from recipes.common import in_order
from recipes.zoo.packages import folder_of, module_of, weights_of
from recipes.zoo.study import Kind, classes, options_of, study

BATCH, NONE = 8, -100
SENTENCES = """
วันนี้|อากาศ|ดี|มาก
ฉัน|ชอบ|กิน|ข้าว|กับ|ปลา
เขา|ไป|โรงเรียน|ทุก|วัน
แม่|ซื้อ|ผัก|ที่|ตลาด
เรา|จะ|ไป|เที่ยว|ทะเล|ด้วย|กัน
หนังสือ|เล่ม|นี้|สนุก|มาก
พ่อ|ทำงาน|อยู่|ที่|กรุงเทพ
น้อง|กำลัง|เล่น|อยู่|ใน|สวน
คุณ|ชื่อ|อะไร
บ้าน|ของ|เขา|อยู่|ใกล้|แม่น้ำ
ฝน|ตก|หนัก|เมื่อ|คืน|นี้
ครู|สอน|ภาษา|ไทย
ผม|อยาก|ดื่ม|น้ำ|เย็น
รถ|คัน|นี้|ราคา|แพง
เด็ก|ๆ|ชอบ|ดู|หนัง
พรุ่งนี้|เรา|มี|สอบ
แมว|ตัว|นี้|สี|ดำ
เธอ|ร้องเพลง|เพราะ|มาก
ร้าน|อาหาร|นี้|อร่อย
เขา|พูด|ภาษา|อังกฤษ|ได้|ดี
หมอ|บอก|ให้|พัก|ผ่อน
นักเรียน|ทุก|คน|ต้อง|มา
ฉัน|ไม่|รู้|ว่า|เขา|อยู่|ที่ไหน
ปี|นี้|เศรษฐกิจ|ไม่|ดี
"""
"""Everyday Thai with its words apart, written for this recipe."""


class Splitter(nn.Module):
    """Two logits a letter, the second of a word that starts there; the network itself gives one a letter of all
    sentences in one row.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, letters: Tensor) -> Tensor:
        """From `letters` by their number ``(sentences, length)`` to ``(sentences, 2, length)``."""
        logit = self.network((letters, None)).view(letters.shape)
        return torch.stack([torch.zeros_like(logit), logit], 1)


def splitter() -> Splitter:
    """The network of letters alone with its weights."""
    # the syllables of the other network need a package, ssg
    module: Any = module_of("attacut.models.seq_ch_conv", {"ssg": {}})
    network = module.Model({"num_tokens": len(alphabet())}, "emb:48|conv:196|l1:32")  # as in its params.yml
    network.load_state_dict(weights_of("attacut", "artifacts", "attacut-c", "model.pth"))
    return Splitter(network).eval()


def alphabet() -> dict[str, int]:
    """Letters by their number."""
    path = folder_of("attacut") / "artifacts" / "attacut-c" / "characters.json"
    found: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return found


def numbered(texts: Sequence[str]) -> Tensor:
    """Texts as numbers of letters, padded with 0: ``(texts, length)``."""
    known = alphabet()
    rows = [torch.tensor([known.get(letter, known["<UNK>"]) for letter in text]) for text in texts]
    return pad_sequence(rows, batch_first=True)


def starts(sentences: Sequence[str]) -> Tensor:
    """1 where a word starts, 0 within one, -100 for padding: ``(sentences, length)``."""
    rows = [
        torch.tensor([int(place == 0) for word in sentence.split("|") for place in range(len(word))])
        for sentence in sentences
    ]
    return pad_sequence(rows, batch_first=True, padding_value=NONE)


def texts(sentences: Sequence[str]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Numbers of letters by the kind of text, and where words start if there are any; familiar ones first."""
    generator = torch.Generator().manual_seed(9)
    letters, targets = numbered([sentence.replace("|", "") for sentence in sentences]), starts(sentences)
    anything = torch.randint(5, len(alphabet()), letters.shape, generator=generator)
    wrong = (torch.rand(letters.shape, generator=generator) < 0.2) & (targets != NONE)
    english = ("thequickbrownfoxjumps", "overthelazydogwhilewe", "lookoutofthewindowand")
    return {
        "other sentences": (letters, targets),
        "a fifth of the letters wrong": (torch.where(wrong, anything, letters), targets),
        "letters at random": (anything, None),
        "English": (numbered(english), None),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, save, load, and print a table of scores by kind of text."""
    options = options_of(__doc__, arguments, 12, 8)
    sentences = SENTENCES.split()
    seen, others = sentences[::2][: options.samples], sentences[1::2][: options.samples]
    kinds = {
        kind: Kind(in_order(letters, letters if targets is None else targets, BATCH), targets)
        for kind, (letters, targets) in texts(others).items()
    }
    whole = [sentence.replace("|", "") for sentence in seen]
    study(options, "words", splitter(), in_order(numbered(whole), starts(seen), BATCH), kinds, classes())


if __name__ == "__main__":
    main()
