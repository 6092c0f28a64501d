"""timm: of each family, the file of a model's code, the smallest, and one more where a family has several kinds."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ..models import Wild, pictures
from ..operators import provide

# name, and what is built otherwise: families of which the smallest is large have fewer or narrower blocks
_SMALL = {"embed_dim": 192, "depth": 4, "num_heads": 3}
_MODELS: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": _SMALL,
    "halonet_h1": {},
    "botnet26t_256": {},
    "lambda_resnet26t": {},
    "test_byobnet": {},
    "mobileone_s0": {},
    "gernet_s": {},
    "repvgg_a0": {},
    "gcresnext26ts": {},
    "bat_resnext26ts": {},
    "resnet50_clip": {},
    "cait_xxs24_224": {"depth": 8},
    "coat_lite_tiny": {},
    "coat_tiny": {},
    "convit_tiny": {},
    "test_vit": {},
    "test_convnext": {},
    "test_maxvit": {},
    "test_mambaout": {},
    "test_efficientnet": {},
    "test_resnet": {},
    "convmixer_768_32": {},
    "convnext_atto": {},
    "convnextv2_atto": {},
    "cpubone_nano": {},
    "crossvit_tiny_240": {},
    "csatv2": {},
    "cs3darknet_focus_s": {},
    "cspresnet50": {},
    "darknet53": {},
    "cspnext_tiny": {},
    "davit_tiny": {},
    "deepseek_vit_412m": _SMALL,
    "deit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "densenet121": {},
    "dla46_c": {},
    "dla60_res2net": {},
    "dpn48b": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {},
    "efficientnet_b0": {},
    "efficientnetv2_rw_t": {},
    "efficientnet_cc_b0_4e": {},
    "mixnet_s": {},
    "mnasnet_small": {},
    "mobilenetv2_035": {},
    "tinynet_e": {},
    "efficientvim_m1": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "eva02_tiny_patch14_224": {},
    "vit_small_patch16_dinov3": _SMALL,
    "fasternet_t0": {},
    "fastvit_t8": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {},
    "gemma4_vit_167m": _SMALL,
    "ghostnet_050": {},
    "ghostnetv3_050": {},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "hiera_tiny_224": {},
    "sam2_hiera_tiny": {},
    "hrnet_w18_small": {},
    "iformer_t": {},
    "inception_next_atto": {},
    "inception_resnet_v2": {},
    "inception_v3": {},
    "inception_v4": {},
    "lcnetv2_small": {},
    "levit_128s": {},
    "levit_conv_128s": {},
    "lowformer_b0": {},
    "mambaout_femto": {},
    "coatnet_nano_rw_224": {},
    "maxvit_pico_rw_256": {},
    "maxxvit_rmlp_nano_rw_256": {},
    "poolformer_s12": {},
    "poolformerv2_s12": {},
    "convformer_s18": {},
    "caformer_s18": {},
    "mixer_s32_224": {},
    "gmlp_ti16_224": {},
    "gmixer_12_224": {},
    "resmlp_12_224": {},
    "lcnet_035": {},
    "mobilenetv3_small_050": {},
    "mobilenetv4_conv_small_035": {},
    "mobilenetv4_hybrid_medium_075": {},
    "mobilenetv5_base": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "mvitv2_tiny": {},
    "naflexvit_base_patch16_gap": _SMALL,
    "nasnetalarge": {},
    "nest_tiny": {},
    "nextvit_small": {},
    "nf_regnet_b0": {},
    "nf_resnet26": {},
    "test_nfnet": {},
    "pit_ti_224": {},
    "pnasnet5large": {},
    "pvt_v2_b0": {},
    "pvt_v2_b2_li": {},
    "qwen3_vit_88m": _SMALL,
    "rdnet_tiny": {},
    "regnetx_002": {},
    "regnety_002": {},
    "regnetz_005": {},
    "repghostnet_050": {},
    "repvit_m0_9": {},
    "res2net50_26w_4s": {},
    "resnest14d": {},
    "resnet18": {},
    "resnet50": {},
    "seresnet18": {},
    "ecaresnet26t": {},
    "resnext50_32x4d": {},
    "resnetblur18": {},
    "resnetv2_50d_gn": {},
    "resnetv2_50x1_bit": {},
    "resnetv2_50d_evos": {},
    "rexnet_100": {},
    "selecsls42": {},
    "legacy_seresnet18": {},
    "sequencer2d_s": {},
    "shvit_s1": {},
    "skresnet18": {},
    "starnet_s050": {},
    "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2, 2, 2)},
    "swinv2_tiny_window8_256": {"depths": (2, 2, 2, 2)},
    "swinv2_cr_tiny_224": {"depths": (2, 2, 2, 2)},
    "tiny_vit_5m_224": {},
    "tnt_s_patch16_224": {"depth": 4},
    "tresnet_m": {},
    "twins_pcpvt_small": {},
    "twins_svt_small": {},
    "vgg11": {},
    "visformer_tiny": {},
    "vit_tiny_patch16_224": {},
    "vit_base_patch16_siglip_224": _SMALL,
    "vit_small_r26_s32_224": {"depth": 4},
    "test_vit_relpos": {},
    "vit_srelpos_small_patch16_224": {"depth": 4},
    "samvit_base_patch16_224": _SMALL,
    "vitamin_small_224": {},
    "volo_d1_224": {},
    "ese_vovnet19b_slim": {},
    "xception41": {},
    "legacy_xception": {},
    "xcit_nano_12_p16_224": {},
}
_SIDE = 96  # pixels of a picture, which costs a sixth of 224 and shows as much; these take no other than their own
_OWN = [
    "test_maxvit", "test_vit", "bat_resnext26ts", "beit_base_patch16_224", "botnet26t_256", "cait_xxs24_224",
    "coat_lite_tiny", "coat_tiny", "coatnet_nano_rw_224", "convit_tiny", "crossvit_tiny_240", "deepseek_vit_412m",
    "deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224", "efficientformer_l1", "efficientformerv2_s0",
    "eva02_tiny_patch14_224", "gcvit_xxtiny", "gmixer_12_224", "gmlp_ti16_224", "halonet_h1", "hiera_tiny_224",
    "levit_128s", "levit_conv_128s", "maxvit_pico_rw_256", "maxxvit_rmlp_nano_rw_256", "mixer_s32_224", "mvitv2_tiny",
    "nest_tiny", "pit_ti_224", "resmlp_12_224", "samvit_base_patch16_224", "swin_tiny_patch4_window7_224",
    "swinv2_cr_tiny_224", "swinv2_tiny_window8_256", "test_vit_relpos", "tiny_vit_5m_224", "tnt_s_patch16_224",
    "visformer_tiny", "vit_base_patch16_siglip_224", "vit_small_r26_s32_224", "vit_srelpos_small_patch16_224",
    "vit_tiny_patch16_224", "vitamin_small_224", "volo_d1_224",
]  # fmt: skip
_SIZES: dict[str, int] = {"gemma4_vit_167m": 192, "qwen3_vit_88m": 192, "sam2_hiera_tiny": 256}


def models() -> list[Wild]:
    """One model of each family."""
    provide()
    from timm.models import get_pretrained_cfg

    found = []
    for name, options in _MODELS.items():
        known = get_pretrained_cfg(name)
        own = 224 if known is None else known.input_size[-1]
        size = _SIZES.get(name, own if name in _OWN else _SIDE)
        build = functools.partial(_build, name, **options)
        found.append(Wild("timm", name, build, pictures(size), images=True))
    return found


def _build(name: str, **options: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    return model
