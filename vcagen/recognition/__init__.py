"""Table 1: VCA in timm's recognition networks.

Importing this package registers the networks of `models.MODELS` with timm, so that `timm.create_model` knows them:
`train.py --device-modules vcagen.recognition` of timm does that.
"""

from vcagen.recognition.models import MODELS

__all__ = ["MODELS"]
