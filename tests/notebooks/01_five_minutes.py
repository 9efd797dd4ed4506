# What must hold at the end of notebooks/01_five_minutes.ipynb: runs in its kernel.

assert "Paris" in text.decode(requests[0].tokens)
assert trace.blocks_in_use.max() <= 5 * 256 // 16 and trace.blocks_in_use[-1] == 0
assert all(request.ended in ("eos", "length") for request in requests)
assert len(answers) == 20 and stats["hit_rate"] > 0.5
assert stats["blocks_peak"] < 0.6 * sum(-(-len(text.chat(c)) // 16) for c in chats)
for chat, answer in list(zip(chats, answers, strict=True))[:3]:  # sharing changes nothing
    assert jaxkv.generate(model, [text.chat(chat)], max_new_tokens=12, max_seqs=1, longest=256) == [list(answer)]
