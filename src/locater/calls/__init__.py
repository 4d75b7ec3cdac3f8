"""Attention calls of a running model. Six acts, each with one word:

recognise   which softmax is attention (`recognise`, `function_table`, `attention_like`)
listen      a listener receives the calls of a module (`listeners`), at the attention interface of transformers
            (`attention_interface`), or among the functions that a module calls (`function_listener`, `flex_attention`)
tap         a family records the parts of a module whose attention passes neither (`patching.record_parts`)
intercept   an interceptor changes a request before the call is made (`interceptors`)
remove      heads are taken out of the calls of a module (`head_removal`)
patch       a method of a module is replaced, and put back (`patching`)
"""
