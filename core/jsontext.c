/* jsontext.c -- see jsontext.h. Shared by the log and by io.json, so that both escape alike. */
#include "jsontext.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

size_t pdk_json_plain(const char *s, size_t len)
{
    size_t n = 0;
    while (n < len && (unsigned char)s[n] >= 0x20 && (unsigned char)s[n] < 0x7f && s[n] != '"' && s[n] != '\\')
        n++;
    return n;
}

/* Bytes of the well-formed UTF-8 sequence that s begins with; 0 = there is none. */
static size_t sequence(const unsigned char *s, size_t len)
{
    size_t n = s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    if (n == 0 || n > len)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xed && s[1] > 0x9f, beyond = s[0] == 0xf4 && s[1] > 0x8f;
    return overlong || surrogate || beyond ? 0 : n;
}

size_t pdk_json_char(const char *s, size_t len, bool mend, char out[PDK_JSON_CHAR], size_t *used)
{
    static const char names[] = "\"\"\\\\\bb\ff\nn\rr\tt"; /* pairs: the character, its letter */
    unsigned char c = (unsigned char)s[0];
    *used = 1;
    for (size_t i = 0; i < sizeof names - 1; i += 2)
        if (c == (unsigned char)names[i]) {
            out[0] = '\\';
            out[1] = names[i + 1];
            return 2;
        }
    if (c < 0x20 || c == 0x7f)
        return (size_t)snprintf(out, PDK_JSON_CHAR, "\\u%04x", c);
    if (c < 0x80) {
        out[0] = s[0];
        return 1;
    }
    size_t n = sequence((const unsigned char *)s, len);
    if (n == 0 && mend) {
        memcpy(out, "\xef\xbf\xbd", 3);
        return 3;
    }
    n = n == 0 ? 1 : n;
    memcpy(out, s, n);
    *used = n;
    return n;
}

bool pdk_json_number(double d, char out[PDK_JSON_NUMBER])
{
    if (isnan(d) || isinf(d))
        return false;
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(out, PDK_JSON_NUMBER, "%.*g", digits, d);
        if (strtod(out, NULL) == d)
            break;
    }
    for (char *p = out; *p != '\0'; p++) /* the host's locale may have another decimal point */
        if (strchr("0123456789+-eE", *p) == NULL)
            *p = '.';
    return true;
}
