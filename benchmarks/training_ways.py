"""Trials of other losses and layouts, as patches of `training_methods.py`: `tv`, `cetv`, `noise` and `grow`.

python benchmarks/training_ways.py train grow BASE ANSWERS.jsonl build/grow --mask-rows 30000
"""

import sys

import torch
import training_methods as T
from transformers import TrainerCallback
from wedlm_hf.adapters import distillation as D, mask_adapter as M, trainer as TR

way = sys.argv[2]
if way in ("tv", "cetv"):
    old_teacher = D.MaskDistillation._teacher
    kept = {}

    def teacher(self, h, k):
        r = old_teacher(self, h, k)
        kept["w"] = r[2].exp()
        return r

    D.MaskDistillation._teacher = teacher
    ce = D.soft_cross_entropy

    def tv(t, l, s):
        q = (l - s[:, None]).exp()
        return 0.5 * ((t - q).abs() * kept["w"]).sum(-1)

    D.soft_cross_entropy = tv if way == "tv" else (lambda t, l, s: ce(t, l, s) + 2 * tv(t, l, s))
if way == "noise":
    old = D.MaskDistillation.masks

    def masks(self, memory, cuts):
        if not torch.is_grad_enabled():
            return old(self, memory, cuts)
        M.NOISE = True
        try:
            return old(self, memory, cuts)
        finally:
            M.NOISE = False

    D.MaskDistillation.masks = masks
    M.NOISE = False
    oc = M.EmbedSlots.__call__

    def call(self, module, args, output):
        got = oc(self, module, args, output)
        if got is None or not M.NOISE:
            return got
        slots = M.UNDER_WAY.slots
        n = slots.count
        B = got.shape[0]
        K = T_model[0]
        # whole runs of random tokens
        run = (torch.rand(B, n // K, 1) < 0.5).expand(-1, -1, K).reshape(B, n)
        toks = torch.randint(3, 49000, (B, n))
        emb = module.weight[toks].to(got.dtype)
        last = torch.where(run[..., None], emb, got[:, -n:])
        return torch.cat([got[:, :-n], last], 1)

    M.EmbedSlots.__call__ = call
    T_model = [4]
    oi = D.MaskDistillation.__init__

    def init(self, model, num_masks=None, *a, **k):
        oi(self, model, num_masks, *a, **k)
        T_model[0] = self.num_masks

    D.MaskDistillation.__init__ = init
if way == "grow":
    oi = TR.MaskAdapterTrainer.__init__

    class Grow(TrainerCallback):
        def __init__(s, t):
            s.t = t

        def on_step_begin(s, args, state, control, **k):
            t = s.t
            full = t._num_masks
            p = t.budget.progress(args)
            if p < 1 / 3:
                n = max(1, full // 4)
            elif p < 2 / 3:
                n = max(1, full // 2)
            else:
                n = full
            t.model.limit = n

    def init(self, *a, **k):
        oi(self, *a, **k)
        self.model.limit = 1
        self.add_callback(Grow(self))
        full = self._num_masks
        mo = self.model
        col = self.data_collator
        of = mo.forward

    TR.MaskAdapterTrainer.__init__ = init
    # the collator sees the depth through the trainer: labels, positions and masks are cut before the forward
    og = TR.MaskAdapterTrainer._get_num_items_in_batch

    def items(self, batches, device):
        n = self.model.limit
        for b in batches:
            b["labels"] = b["labels"][..., :n]
        full = self.model.depth_weights
        self.model.depth_weights = full[:n]
        try:
            return og(self, batches, device)
        finally:
            self.model.depth_weights = full

    TR.MaskAdapterTrainer._get_num_items_in_batch = items
    of = D.MaskDistillation.forward

    def forward(self, input_ids, cuts, labels, **k):
        full, w = self.num_masks, self.depth_weights
        n = labels.shape[-1]
        self.num_masks = n
        self.depth_weights = w[:n]
        try:
            return of(self, input_ids, cuts, labels, **k)
        finally:
            self.num_masks, self.depth_weights = full, w

    D.MaskDistillation.forward = forward
    oc = TR.MaskAdapterTrainer._count

    def count(self, o):
        f = self._num_masks
        pad = f - o["counted"].shape[-1]
        import torch.nn.functional as F

        o = {k: (F.pad(v, (0, pad)) if v.ndim == 3 else v) for k, v in o.items()}
        return oc(self, o)

    TR.MaskAdapterTrainer._count = count
T.WAYS.setdefault(way, {})
T.app()
