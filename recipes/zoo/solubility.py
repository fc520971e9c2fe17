"""Solubility of molecules as it is installed: SolTranNet's transformer (Francoeur, Koes 2021), with intervals.

python -m recipes.zoo.solubility            three kinds of molecules; a minute on one core
python -m recipes.zoo.solubility --smoke    twelve molecules of each; seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recipes.zoo.packages import module_of, weights_of
from recipes.zoo.study import Kind, Loader, options_of, study, values

BATCH = 12
MEASURED = """
c1ccccc1 -1.64; Cc1ccccc1 -2.21; CCc1ccccc1 -2.77; Oc1ccccc1 0.00; Nc1ccccc1 -0.41; c1ccc2ccccc2c1 -3.60
c1ccc2cc3ccccc3cc2c1 -6.35; c1ccc2c(c1)ccc1ccccc12 -5.26; c1ccc(cc1)-c1ccccc1 -4.35; C1CCCCC1 -3.10; CCCCC -3.18
CCCCCC -3.84; CCCCCCC -4.53; CCCCCCCC -5.24; CC(C)C -2.55; C1CCCC1 -2.64; C=CCCCC -3.23; C1=CCCCC1 -2.59
ClC(Cl)Cl -1.17; ClC(Cl)(Cl)Cl -2.31; ClCCl -0.63; ClCCCl -1.06; ClC=C(Cl)Cl -1.96; Clc1ccccc1 -2.38
Brc1ccccc1 -2.55; Ic1ccccc1 -3.01; Fc1ccccc1 -1.80; Clc1ccc(Cl)cc1 -3.27; Clc1ccccc1Cl -3.05; CCOCC -0.09
CCCCO 0.00; CCCCCO -0.60; CCCCCCO -1.24; CCCCCCCO -1.81; CCCCCCCCO -2.39; OC1CCCCC1 -0.44
CC(=O)OCC -0.04; CC(=O)OCCCC -1.24; CCC(=O)CC -0.28; O=C1CCCCC1 -0.60; CCCCC(C)=O -0.80; O=Cc1ccccc1 -1.19
CC(=O)c1ccccc1 -1.28; COc1ccccc1 -1.85; OC(=O)c1ccccc1 -1.55; OC(=O)c1ccccc1O -1.82; COC(=O)c1ccccc1 -1.85
O=[N+]([O-])c1ccccc1 -1.80; Cc1ccccc1O -0.62; Cc1ccc(O)cc1 -0.73; Oc1ccc2ccccc2c1 -2.28; Cc1ccc(C)cc1 -2.77
CC(=O)Nc1ccccc1 -1.33; CC(=O)Nc1ccc(O)cc1 -1.03; CC(=O)Oc1ccccc1C(=O)O -1.72; Cn1cnc2c1c(=O)n(C)c(=O)n2C -0.88
CC(C)Cc1ccc(cc1)C(C)C(=O)O -3.99; c1ccc2[nH]ccc2c1 -1.52; c1ccc2ncccc2c1 -1.30; c1ccsc1 -1.33
"""
"""Molecules, and the logarithm of their measured solubility in water in mol/l, rounded, from the literature (most as in
Delaney 2004)."""

SALTS = (
    "[Na+].[Cl-] [K+].[Br-] [Na+].CC(=O)[O-] [Li+].[F-] [NH4+].[Cl-] [Ca+2].[Cl-].[Cl-] [Zn+2].[O-]S(=O)(=O)[O-] "
    "[Mg+2].[O-]S(=O)(=O)[O-] [K+].[O-][N+](=O)[O-] [Fe+3].[Cl-].[Cl-].[Cl-] [Ag+].[O-][N+](=O)[O-] [Na+].[OH-]"
)
"""The package itself warns of them."""

LARGE = tuple("C" * length for length in range(20, 56, 3))
"""Paraffins, from icosane on."""


def network() -> nn.Module:
    """The network with its weights: from the arguments that `graphs` makes to ``(molecules, 1)``."""
    found: nn.Module = module_of("soltrannet.transformer").make_model()
    found.load_state_dict(weights_of("soltrannet", "soltrannet_aqsol_trained.weights"))
    return found.eval()


def graphs(molecules: Sequence[str]) -> tuple[Tensor, Tensor, Tensor, None]:
    """The network's arguments: features of atoms, which are there, who is bound to whom; all padded; no edges."""
    from rdkit.Chem import MolFromSmiles

    package: Any = module_of("soltrannet.data_utils")
    found = [package.featurize_mol(MolFromSmiles(molecule), True) for molecule in molecules]
    atoms = nn.utils.rnn.pad_sequence([torch.as_tensor(part).float() for part, _ in found], batch_first=True)
    bonds = torch.zeros(len(found), atoms.shape[1], atoms.shape[1])
    for row, (_, part) in zip(bonds, found, strict=True):
        row[: len(part), : len(part)] = torch.as_tensor(part)
    return atoms, atoms.abs().sum(-1) != 0, bonds, None


def batches(molecules: Sequence[str], targets: Tensor) -> Loader:
    """Batches of `graphs` and targets."""
    return [
        (graphs(molecules[start : start + BATCH]), targets[start : start + BATCH])
        for start in range(0, len(molecules), BATCH)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, predict, save, load, and print a table of scores by kind of molecule."""
    options = options_of(__doc__, arguments, 30, 12)
    pairs = [pair.split() for pair in MEASURED.replace("\n", ";").split(";") if pair.strip()]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    molecules = [pairs[row][0] for row in order]
    targets = torch.tensor([[float(pairs[row][1])] for row in order])
    samples, salts = options.samples, SALTS.split()
    kinds = {
        "held out": Kind(batches(molecules[-samples:], targets[-samples:]), targets[-samples:]),
        "long paraffins": Kind(batches(LARGE, torch.zeros(len(LARGE), 1)), None),
        "salts": Kind(batches(salts, torch.zeros(len(salts), 1)), None),
    }
    loader = batches(molecules[:samples], targets[:samples])
    study(options, "solubility", network(), loader, kinds, values, likelihood="regression")


if __name__ == "__main__":
    main()
