/* The functions of macOS that runtime/machine/darwin.py calls, over objects of this file.

   Objects count their references: a release too many, or a use after the last one, aborts. `live` is the number of
   objects that are owned. Environment variables break one part each: FAKE=no-channels,no-subscription,... */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STRING = 7, NUMBER = 22, ARRAY = 19, DICTIONARY = 18, SUBSCRIPTION = 99 };

typedef struct Object {
    unsigned long kind;
    long references;
    char text[64];
    int64_t value;
    long count;
    struct Object *keys[8], *values[16];
} Object;

long live = 0;
int64_t ticks = 0; /* samples so far: every counter grows with them */
static int services = 0, tokens = 0;

static int broken(const char *part) {
    const char *all = getenv("FAKE");
    return all != NULL && strstr(all, part) != NULL;
}

static Object *check(const void *reference) {
    Object *object = (Object *)reference;
    if (object == NULL || object->references <= 0) {
        fprintf(stderr, "use of a released object\n");
        abort();
    }
    return object;
}

static Object *make(unsigned long kind) {
    Object *object = calloc(1, sizeof(Object));
    object->kind = kind;
    object->references = 1;
    live++;
    return object;
}

void CFRelease(const void *reference) {
    Object *object = check(reference);
    if (--object->references > 0) return;
    live--;
    for (long i = 0; i < object->count; i++) {
        if (object->kind == DICTIONARY) CFRelease(object->keys[i]);
        CFRelease(object->values[i]);
    } /* never freed: a later use is found by its count */
}

unsigned long CFGetTypeID(const void *reference) { return check(reference)->kind; }
unsigned long CFStringGetTypeID(void) { return STRING; }
unsigned long CFNumberGetTypeID(void) { return NUMBER; }
unsigned long CFArrayGetTypeID(void) { return ARRAY; }
unsigned long CFDictionaryGetTypeID(void) { return DICTIONARY; }

const void *CFStringCreateWithCString(const void *allocator, const char *text, uint32_t encoding) {
    if (allocator != NULL || encoding != 0x08000100) abort();
    Object *object = make(STRING);
    snprintf(object->text, sizeof object->text, "%s", text);
    return object;
}

unsigned char CFStringGetCString(const void *string, char *buffer, long size, uint32_t encoding) {
    Object *object = check(string);
    if (object->kind != STRING || encoding != 0x08000100) abort();
    if ((long)strlen(object->text) >= size) return 0;
    strcpy(buffer, object->text);
    return 1;
}

unsigned char CFNumberGetValue(const void *number, long type, void *out) {
    Object *object = check(number);
    if (object->kind != NUMBER || type != 4) abort();
    *(int64_t *)out = object->value;
    return 1;
}

long CFArrayGetCount(const void *array) {
    if (check(array)->kind != ARRAY) abort();
    return check(array)->count;
}

const void *CFArrayGetValueAtIndex(const void *array, long place) {
    if (check(array)->kind != ARRAY || place < 0 || place >= check(array)->count) abort();
    return check(array)->values[place];
}

long CFDictionaryGetCount(const void *dictionary) {
    if (check(dictionary)->kind != DICTIONARY) abort();
    return check(dictionary)->count;
}

const void *CFDictionaryGetValue(const void *dictionary, const void *key) {
    Object *object = check(dictionary);
    if (object->kind != DICTIONARY || check(key)->kind != STRING) abort();
    for (long i = 0; i < object->count; i++)
        if (strcmp(object->keys[i]->text, check(key)->text) == 0) return object->values[i];
    return NULL;
}

static void put(Object *dictionary, const char *key, Object *value) {
    dictionary->keys[dictionary->count] = (Object *)CFStringCreateWithCString(NULL, key, 0x08000100);
    dictionary->values[dictionary->count++] = value;
}

static Object *number(int64_t value) {
    Object *object = make(NUMBER);
    object->value = value;
    return object;
}

void *CFDictionaryCreateMutableCopy(const void *allocator, long capacity, const void *dictionary) {
    Object *from = check(dictionary);
    if (allocator != NULL || from->kind != DICTIONARY || capacity < from->count) abort();
    Object *copy = make(DICTIONARY);
    for (long i = 0; i < from->count; i++) {
        copy->keys[i] = from->keys[i];
        copy->values[i] = from->values[i];
        copy->keys[i]->references++;
        copy->values[i]->references++;
    }
    copy->count = from->count;
    return copy;
}

/* -- IOReport ---------------------------------------------------------------------------------------------------- */

const void *IOReportCopyChannelsInGroup(const void *group, const void *subgroup, uint64_t a, uint64_t b, uint64_t c) {
    if (strcmp(check(group)->text, "Energy Model") != 0 || subgroup != NULL || a || b || c) abort();
    if (broken("no-channels")) return NULL;
    Object *channels = make(DICTIONARY);
    put(channels, "IOReportChannels", make(ARRAY));
    return channels;
}

void *IOReportCreateSubscription(const void *a, void *channels, void **subscribed, uint64_t b, const void *c) {
    if (a != NULL || check(channels)->kind != DICTIONARY || b || c != NULL) abort();
    *subscribed = NULL;
    return broken("no-subscription") ? NULL : make(SUBSCRIPTION);
}

static void channel(Object *array, const char *name, const char *unit, int64_t value) {
    Object *found = make(DICTIONARY);
    put(found, "name", (Object *)CFStringCreateWithCString(NULL, name, 0x08000100));
    put(found, "unit", (Object *)CFStringCreateWithCString(NULL, unit, 0x08000100));
    put(found, "value", number(value));
    array->values[array->count++] = found;
}

const void *IOReportCreateSamples(const void *subscription, const void *channels, const void *unused) {
    if (check(subscription)->kind != SUBSCRIPTION || check(channels)->kind != DICTIONARY || unused != NULL) abort();
    if (broken("no-sample")) return NULL;
    ticks++;
    Object *sample = make(DICTIONARY), *array = make(ARRAY);
    put(sample, broken("other-key") ? "Channels" : "IOReportChannels", broken("no-array") ? number(1) : array);
    if (broken("no-array")) {
        CFRelease(array);
        return sample;
    }
    const char *milli = broken("other-units") ? "furlongs" : "mJ      ";
    channel(array, "DIE_0_CPU Energy", milli, 1000 * ticks);
    channel(array, "DIE_1_CPU Energy", milli, 1000 * ticks);
    channel(array, "PCPU", milli, 900 * ticks); /* a part of the total */
    channel(array, "GPU Energy", broken("other-units") ? "?" : "nJ", INT64_C(9000000000) * ticks);
    channel(array, "GPU SRAM", milli, 800 * ticks);
    channel(array, "DRAM", broken("other-units") ? "" : "uJ", 500000 * ticks);
    channel(array, "ANE0", milli, 0);
    array->values[array->count++] = number(3); /* no channel at all */
    return sample;
}

static const void *field(const void *item, const char *name) {
    const void *key = CFStringCreateWithCString(NULL, name, 0x08000100);
    const void *found = CFDictionaryGetValue(item, key);
    CFRelease(key);
    return found;
}

const void *IOReportChannelGetChannelName(const void *item) { return field(item, "name"); }
const void *IOReportChannelGetUnitLabel(const void *item) { return field(item, "unit"); }
int64_t IOReportSimpleGetIntegerValue(const void *item, int32_t unused) {
    if (unused != 0) abort();
    return check(field(item, "value"))->value;
}

/* -- IOKit ------------------------------------------------------------------------------------------------------- */

void *IOServiceMatching(const char *name) {
    if (strcmp(name, "IOAccelerator") != 0) abort();
    return make(DICTIONARY);
}

uint32_t IOServiceGetMatchingService(uint32_t port, const void *matching) {
    if (port != 0) abort();
    CFRelease(matching);
    if (broken("no-gpu")) return 0;
    services++;
    return 4711;
}

const void *IORegistryEntryCreateCFProperty(uint32_t entry, const void *key, const void *allocator, uint32_t options) {
    if (entry != 4711 || allocator != NULL || options) abort();
    if (strcmp(check(key)->text, "PerformanceStatistics") != 0) abort();
    if (broken("no-statistics")) return NULL;
    if (broken("odd-statistics")) return number(5);
    Object *found = make(DICTIONARY);
    put(found, "Device Utilization %", number(87));
    put(found, "In use system memory", number(INT64_C(6) << 30));
    return found;
}

int32_t IOObjectRelease(uint32_t entry) {
    if (entry != 4711 || --services < 0) abort();
    return 0;
}

long open_services(void) { return services; }

/* -- notify ------------------------------------------------------------------------------------------------------ */

uint32_t notify_register_check(const char *name, int *token) {
    if (broken("no-notification") || strcmp(name, "com.apple.system.thermalpressurelevel") != 0) return 1;
    tokens++;
    *token = 12;
    return 0;
}

uint32_t notify_get_state(int token, uint64_t *state) {
    if (token != 12) abort();
    *state = UINT64_C(2);
    return broken("no-state") ? 1 : 0;
}

uint32_t notify_cancel(int token) {
    if (token != 12 || --tokens < 0) abort();
    return 0;
}

long open_tokens(void) { return tokens; }
