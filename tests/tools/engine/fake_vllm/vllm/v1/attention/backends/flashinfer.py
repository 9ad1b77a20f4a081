"""A builder of attention metadata that says when it builds."""


class FlashInferMetadataBuilder:
    def __init__(self, note):
        self.note = note

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        self.note("build", common_attn_metadata)
        return common_attn_metadata
