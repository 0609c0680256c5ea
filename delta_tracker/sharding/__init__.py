"""The only folder that knows torchrec and fbgemm: what is sharded how, when it is written, what it holds."""
