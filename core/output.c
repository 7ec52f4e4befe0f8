/* output.c -- see output.h. */
#include "output.h"

static _Thread_local const pdk_output_sink *current;

const pdk_output_sink *pdk_output_current(void)
{
    return current;
}

const pdk_output_sink *pdk_output_enter(const pdk_output_sink *sink)
{
    const pdk_output_sink *former = current;
    current = sink;
    return former;
}
