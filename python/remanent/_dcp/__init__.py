"""Parts of `remanent.dcp`: staging, and conversion from and to other formats."""
