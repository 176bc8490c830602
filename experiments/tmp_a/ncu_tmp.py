import kernel_bench_sparse as kb, jax
TC=kb.module("sparse_verify.tiles").TileConfig
for c,t in ((kb.Case(nodes=5,group=4),TC(selected=4,window=2,stages=3)),(kb.Case(nodes=65,group=8),TC(selected=3,window=1,stages=3))):
    w=kb.workload(c,calls=2); cached=kb.shared_caches(c)
    f=jax.jit(kb.call(c,t))
    for i in range(2): jax.block_until_ready(f(w.q,cached[i],w.tree,w.queries,w.selections[i%2].schedule,w.gates))
