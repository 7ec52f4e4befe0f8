/* jsontext.h -- the two things that writing JSON needs: a string's characters escaped, and a number's digits. */
#ifndef PDK_JSONTEXT_H
#define PDK_JSONTEXT_H

#include <stdbool.h>
#include <stddef.h>

#define PDK_JSON_CHAR   8  /* bytes that one character can become */
#define PDK_JSON_NUMBER 40 /* bytes of a number with its NUL */

/* Writes the first character of s[0..len) (len > 0) as it stands inside a JSON string, returns the bytes written and sets
 * *used to the bytes taken. A byte that is no UTF-8 is kept as it is, or with `mend` becomes U+FFFD. */
size_t pdk_json_char(const char *s, size_t len, bool mend, char out[PDK_JSON_CHAR], size_t *used);
/* How many bytes at the start of s stand for themselves: printable ASCII without quote and backslash. */
size_t pdk_json_plain(const char *s, size_t len);
/* The shortest digits that read back as the same number; false for NaN and the infinities, which JSON has not. Independent
 * of the locale. */
bool pdk_json_number(double d, char out[PDK_JSON_NUMBER]);

#endif
