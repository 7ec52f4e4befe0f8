/* impl.h -- what impl.c (implementations) and instance.c (the default one) share. */
#ifndef PDK_IMPL_H
#define PDK_IMPL_H

#include "paddock.h"

/* Whether it has the operation at all: a loser of a race that cannot be shut down is dropped. */
bool pdk_impl_can_shutdown(const pdk_impl *impl);
void pdk_impl_discard_holders(pdk_impl *impl);

#endif
