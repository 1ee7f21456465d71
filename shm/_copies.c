/* Copies past the caches, and comparisons. Built if there is a compiler, and called by ctypes (memcpy.py), which lets go of Python's lock.

   What is copied here is read long after, by other processes, and is larger than any cache. An ordinary store reads
   its line of memory first and drives something else out of the cache; a streaming store does neither. glibc's memcpy
   streams as well, but only when a single call copies more than about a cache's size (240 MB on the machine measured):
   400 tensors of 2.7 MB took 89 ms with it and 58 ms with this, one thread each. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

#define LINE 64
/* Less than that is not worth the line at each end that is stored in the ordinary way. */
#define LEAST 1024

static void copy(char *to, const char *from, size_t nbytes) {
    if (nbytes >= LEAST) {
        size_t head = -(uintptr_t)to & (LINE - 1);
        memcpy(to, from, head);
        to += head, from += head, nbytes -= head;
        for (; nbytes >= LINE; to += LINE, from += LINE, nbytes -= LINE) {
            __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)to + 1, b);
            _mm_stream_si128((__m128i *)to + 2, c);
            _mm_stream_si128((__m128i *)to + 3, d);
        }
    }
    memcpy(to, from, nbytes);
}

#else
#define copy memcpy
#define _mm_sfence()
#endif

/* Copies sizes[i] bytes from from[i] to to[i], for each i below count. When it returns other processes see all of it. */
void asyncckpt_copy_many(const uint64_t *to, const uint64_t *from, const uint64_t *sizes, size_t count) {
    for (size_t i = 0; i < count; i++)
        copy((char *)(uintptr_t)to[i], (const char *)(uintptr_t)from[i], sizes[i]);
    _mm_sfence();
}

#define WORDS 16
#define BLOCK 4096

/* Returns a bit for each of the next WORDS words that differ. */
static uint32_t mask(const uint16_t *one, const uint16_t *other) {
#if defined(__SSE2__)
    const __m128i *a = (const __m128i *)one, *b = (const __m128i *)other;
    __m128i low = _mm_cmpeq_epi16(_mm_loadu_si128(a), _mm_loadu_si128(b));
    __m128i high = _mm_cmpeq_epi16(_mm_loadu_si128(a + 1), _mm_loadu_si128(b + 1));
    return 0xffff ^ (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
#else
    uint32_t found = 0;
    for (uint32_t word = 0; word < WORDS; word++)
        found |= (uint32_t)(one[word] != other[word]) << word;
    return found;
#endif
}

/* Writes the numbers of the 16-bit words that differ to at, in rising order, and returns how many they are. Stops soon
   after it has found more than most. There is room at at for most + BLOCK numbers. The first loop has no branch that
   depends on the words, because wrongly predicted branches would take longer than the memory. */
size_t asyncckpt_differing(const uint16_t *one, const uint16_t *other, size_t words, uint32_t *at, size_t most) {
    size_t found = 0, whole = words - words % WORDS;
    uint32_t begins[BLOCK / WORDS], masks[BLOCK / WORDS];
    for (size_t block = 0; block < whole && found <= most; block += BLOCK) {
        size_t end = whole - block < BLOCK ? whole : block + BLOCK, changed = 0;
        for (size_t word = block; word < end; word += WORDS) {
            begins[changed] = (uint32_t)word;
            masks[changed] = mask(one + word, other + word);
            changed += masks[changed] != 0;
        }
        for (size_t i = 0; i < changed; i++)
            for (uint32_t left = masks[i]; left; left &= left - 1)
                at[found++] = begins[i] + (uint32_t)__builtin_ctz(left);
    }
    for (size_t word = whole; word < words && found <= most; word++)
        if (one[word] != other[word])
            at[found++] = (uint32_t)word;
    return found;
}
