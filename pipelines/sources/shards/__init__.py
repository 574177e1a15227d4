"""Images in tar files beside an index.npz, which says where each image is and has its labels.

The command `pack` writes both, or only the index of tar files that another program wrote, such as webdataset's. Images
are read at their offsets, from a folder (`LocalTars`) or from an address (`RemoteTars`).
"""

from peclr_dali.pipelines.sources.shards.load import load_shards as load_shards
